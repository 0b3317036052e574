"""Methods of later papers."""
