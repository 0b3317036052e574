"""Commands of ``trishul`` on a cluster: jobs, the way to the cluster, and how far they are."""
