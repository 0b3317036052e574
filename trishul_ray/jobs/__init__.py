"""Commands of ``trishul`` as Ray jobs on a cluster."""
