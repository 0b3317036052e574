"""Files: any pyarrow filesystem, durable writes, checksums, and redaction."""
