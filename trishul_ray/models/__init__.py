"""Backbones: find them by name, describe them, load them, and share them between processes."""
