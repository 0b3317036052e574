"""The paper's bounds beside measured numbers."""
