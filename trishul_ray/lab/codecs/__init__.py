"""Codecs, which encode changes as bytes; see :mod:`trishul_ray.lab.codecs.base`."""
