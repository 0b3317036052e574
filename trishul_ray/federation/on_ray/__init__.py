"""The Ray shell around the federation: session, slices, actors, pool, driver."""
