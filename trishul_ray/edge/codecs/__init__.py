"""Codecs: how a change becomes bytes. See :mod:`trishul_ray.edge.codecs.base`."""
