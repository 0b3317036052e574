"""The tracking server that cluster/mlflow/start.sh starts."""

import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import psutil
from ports import free_port

SCRIPT = Path(__file__).parents[1] / "cluster" / "mlflow" / "start.sh"
PASSWORD = "a-password-that-was-made-up"


class MlflowServer:
    """The server that the script starts, in a separate home folder."""

    def __init__(self, home):
        self.port = free_port()
        self.home, self.address = home, f"http://127.0.0.1:{self.port}"
        self.environment = {
            "HOME": str(home),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "MLFLOW_HOST": "127.0.0.1",
            "MLFLOW_PORT": str(self.port),
        }
        (home / ".mlflow").mkdir(parents=True)
        (home / ".mlflow" / "credentials").write_text(
            f"[mlflow]\nmlflow_tracking_username = trishul\nmlflow_tracking_password = {PASSWORD}\n"
        )

    def start(self):
        words = ["bash", str(SCRIPT), str(self.home / "artifacts")]
        subprocess.run(words, env=self.environment, check=True)

    def wait(self):
        deadline = time.monotonic() + 400
        while True:
            try:
                urllib.request.urlopen(f"{self.address}/health", timeout=1).close()
                return
            except OSError:
                assert time.monotonic() < deadline, self.log()
                time.sleep(0.3)

    def log(self):
        return (self.home / "mlflow" / "server.log").read_text()

    def end(self):
        shell = psutil.Process(int((self.home / "mlflow" / "pid").read_text()))
        family = [shell, *shell.children(recursive=True)]
        for process in family:
            process.send_signal(signal.SIGKILL)
        psutil.wait_procs(family, 10)
