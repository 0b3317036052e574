"""Store files: pyarrow filesystems, durable writes, checksums, locks, and redaction."""
