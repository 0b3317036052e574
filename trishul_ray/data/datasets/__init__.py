"""The public datasets: one module each, with source, columns, row counts and classes."""
