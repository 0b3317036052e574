"""User data: tables, folders of images, and rows from Python."""
