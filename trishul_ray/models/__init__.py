"""Backbones: how they are found by name, described, loaded and shared between processes."""
