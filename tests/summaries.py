"""Invented results of runs."""

from dataclasses import MISSING, fields
from typing import get_origin

from trishul_ray.data.coverage import Coverage, RowCounts
from trishul_ray.report.summary import Hardware, RunSummary

#: The fields of a machine that does not exist.
MACHINE = {
    "machine": "x86_64",
    "system": "Linux",
    "cpus": 16,
    "memory_gib": 125.9,
    "gpus": ["NVIDIA H100 80GB HBM3"],
    "cpu_capability": "AVX512",
    "processor": "Invented Processor 9000",
    "kernels": {},
}


def invented_hardware(**known):
    """Return a machine with these fields."""
    return Hardware(**MACHINE | known)


def invented_summary(headline="accuracy", **known):
    """Return a summary with these fields; the others are empty."""
    rows = RowCounts(500, 500, 500)
    known = {
        "headline": headline,
        "attempt": "",
        "mlflow_run_id": None,
        "data": Coverage("", "", None, rows, rows),
        "hardware": invented_hardware(),
        **known,
    }
    for field in fields(RunSummary):
        if field.name not in known and field.default is field.default_factory is MISSING:
            known[field.name] = (get_origin(field.type) or field.type)()
    return RunSummary(**known)
