"""Adapters of frozen linear layers: their types, the flat layout, attaching, merging, export."""
