"""One federated run: a functional core (local, reduce, server) and the Ray shell around it."""
