"""The peers: each trains a workload in the best form its own users would write."""
