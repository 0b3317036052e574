"""Codecs: how a change becomes bytes. See :mod:`trishul_ray.lab.codecs.base`."""
