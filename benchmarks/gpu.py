"""What a GPU must show: right results, the prox, a step, the paper's run, other backbones, slices.

    python benchmarks/gpu.py [PART ...] [options]

Parts (all by default), and the seconds after which each is stopped:

    right (240)      states against the CPU's; the same bytes twice and resumed; tests marked gpu
    prox (80)        the proximal map on stacks of cores: time and error of each route
    step (190)       a local step of ViT-B/16 against its limit: by parts, profiled, as a CUDA graph
    run (200)        the paper's run on CIFAR-100: 50 rounds of 3 clients x 50 steps of 32
    backbones (330)  T5-Base and LLaMA-3.2-1B: a step against its limit, memory of two client actors
    slices (240)     processes with capped memory on one GPU; one that wants too much

Each part runs in a process of its own, and a part that fails or is stopped does not stop the next.
Results go to benchmarks/results/ section by section; parts measured later on the same day are added
to the same page. With a mirror (TRISHUL_HUB, or --hub) the run uses its images, without one noise.

The script needs neither Ray, MLflow nor datasets. --rehearse runs every part on the CPU with tiny
shapes, which says that the script works and nothing else.
"""

import argparse
import importlib.util
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parent)]  # the package need not be installed

from trishul_ray.federation.determinism import set_environment  # noqa: E402

#: Seconds after which a part is stopped.
LIMITS = {"right": 240, "prox": 80, "step": 190, "run": 200, "backbones": 330, "slices": 240}
#: Modules that the core imports, and the packages they are in.
NEEDED = {
    "torch": "torch",
    "transformers": "transformers",
    "numpy": "numpy",
    "safetensors": "safetensors",
    "tokenizers": "tokenizers",
    "huggingface_hub": "huggingface-hub",
    "pyarrow": "pyarrow",
    "pydantic": "pydantic",
    "yaml": "PyYAML",
    "filelock": "filelock",
    "tenacity": "tenacity",
    "psutil": "psutil",
    "PIL": "pillow",
}


def main() -> None:
    """Run the parts one after the other."""
    options = _arguments()
    missing = [
        package for name, package in NEEDED.items() if importlib.util.find_spec(name) is None
    ]
    if missing:
        print(f"missing: pip install {' '.join(missing)}", file=sys.stderr)
        raise SystemExit(2)
    if options.hub:
        os.environ["TRISHUL_HUB"] = str(options.hub)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    set_environment()
    # One process imports everything once and becomes each part; it never touches the GPU itself.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["_gpu_parts"])
    first = context.Process(target=_import)
    first.start()  # what it imports does not count as part of the first part
    first.join()
    failed = False
    with tempfile.TemporaryDirectory() as scratch:
        for part in [part for part in LIMITS if part in (options.parts or LIMITS)]:
            given = (part, options.rehearse, options.out, scratch)
            print(f"\n# {part}", flush=True)
            began = time.perf_counter()
            process = context.Process(target=_run, args=given)
            process.start()
            process.join(options.limit or LIMITS[part])
            if process.is_alive():
                with suppress(ProcessLookupError):  # it has not made itself a group yet
                    os.killpg(process.pid, signal.SIGKILL)
                process.kill()
                process.join()
            if process.exitcode:
                failed = True
                seconds = round(time.perf_counter() - began)
                note = context.Process(target=_note, args=(*given, seconds))
                note.start()
                note.join()
    raise SystemExit(int(failed))


def _import() -> None:
    import _gpu_parts  # noqa: F401


def _run(*given: Any) -> None:
    import _gpu_parts

    _gpu_parts.run_part(*given)


def _note(*given: Any) -> None:
    import _gpu_parts

    _gpu_parts.note_stopped(*given)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("parts", nargs="*", metavar="PART", help=" ".join(LIMITS))
    add("--rehearse", action="store_true", help="on the CPU, with tiny shapes")
    add("--hub", type=Path, help="a mirror with CIFAR-100; default TRISHUL_HUB")
    add("--limit", type=float, help="seconds of each part, instead of its own")
    add("--out", type=Path, default=FOLDER / "results", help="folder of the results")
    options = parser.parse_args()
    unknown = set(options.parts) - set(LIMITS)
    if unknown:
        parser.error(f"unknown part {', '.join(sorted(unknown))}; known: {', '.join(LIMITS)}")
    return options


if __name__ == "__main__":
    main()
