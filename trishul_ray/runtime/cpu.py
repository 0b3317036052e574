"""The CPU cores that a process may use, and whether threads share too few of them."""


def usable_cores() -> int:
    """Return the number of cores that this process may use, by its affinity and cgroup quota."""
    import joblib  # only here, as it takes a tenth of a second

    cores: int = joblib.cpu_count()
    return cores


def oversubscription_warning(processes: int, threads: int, cores: float) -> str | None:
    """Return a one-line warning if processes of ``threads`` each share fewer cores, else None."""
    if processes * threads <= cores:
        return None
    actors = f"{processes} actors x " if processes > 1 else ""
    return (
        f"{actors}resources.threads={threads} uses {processes * threads} threads on {cores:g} "
        "cores: rounds take longer; the results stay the same"
    )
