"""The public datasets, one file each: source, columns, row counts and classes."""
