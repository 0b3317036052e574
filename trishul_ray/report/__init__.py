"""What a finished run shows: figures."""
