"""The Python code of the README and its pages, unchanged: a run, its predictions, its adapter."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_python_of_the_readme_runs_and_predicts(cache, tmp_path):
    short, interface, objects, adapter = (
        block
        for page in ("README.md", "docs/python.md", "docs/output.md")
        for block in re.findall(
            r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL
        )
    )
    assert {*short.splitlines()} <= {*interface.splitlines()}
    images, labels = load_digits(return_X_y=True)
    seven = int(np.flatnonzero(labels == 7)[0])
    pixels = np.rint(images[seven] * (255 / 16)).astype(np.uint8).reshape(8, 8)
    exif = Image.Exif()
    exif[0x0112] = 6  # the orientation of a phone held upright
    turned = np.ascontiguousarray(np.rot90(pixels))
    Image.fromarray(turned).save(tmp_path / "seven.png", exif=exif)
    assert '"runs/<id>/adapter"' in adapter
    # In one process and without MLflow, which other tests start.
    setup = "import functools, trishul_ray\n"
    setup += "run = functools.partial(trishul_ray.run, backend='inline', mlflow=False)\n"
    code = f"{interface}\nfirst = result\n{objects}\nprint(result.final)\n"
    code = setup + code.replace("trishul_ray.run(", "run(")
    code += adapter.replace('"runs/<id>/adapter"', "first.adapter_path")
    code += "\nprint(first.predict(['seven.png'])[0], first.predict([images[7]])[0])\n"
    code += "assert same.summary == first.summary\n"
    code += "assert (first.history.index == range(11)).all()\n"
    (tmp_path / "readme.py").write_text(code, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TRISHUL_CACHE": str(cache)}
    done = subprocess.run(
        [sys.executable, "readme.py"], cwd=tmp_path, capture_output=True, text=True,
        timeout=280, env=environment | {"OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    *_, digit, both = done.stdout.splitlines()
    assert digit == "7" and both == "7 7"
    assert "['0', '1', '2', '3', '4']" in done.stdout
