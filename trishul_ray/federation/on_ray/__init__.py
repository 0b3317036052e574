"""Run the federation on Ray: session, slices, actors, pool, driver."""
