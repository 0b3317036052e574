"""Entry point of ``python -m trishul_ray.cli``."""

from trishul_ray.cli import main

main()
