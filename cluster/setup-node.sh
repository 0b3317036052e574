#!/usr/bin/env bash
# Install the project on a node and set its environment; fast if the project has not changed.
#
#   setup-node.sh URI    folder or bucket of the results, e.g. s3://my-trishul-results
set -euo pipefail

bucket=${1:?usage: setup-node.sh s3://BUCKET}
if [[ $bucket == *CHANGE-ME* ]]; then
  echo "cluster file, setup_commands: replace CHANGE-ME with the name of your bucket" >&2
  exit 2
fi

# With an older driver, Ray finds a GPU that torch cannot use.
least_driver=580
driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1) || true
if [[ $driver =~ ^[0-9]+ ]] && ((BASH_REMATCH[0] < least_driver)); then
  echo "the NVIDIA driver of this node is $driver, and torch needs $least_driver or newer: use a newer image" >&2
  exit 2
fi

project=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
environment=$HOME/.trishul-env
# Ray sets RAY_HEAD_IP on workers. On the head, it is this machine.
head=${RAY_HEAD_IP:-$(hostname -I | cut -d' ' -f1)}

# Read by every shell that Ray opens on this node.
cat >"$environment" <<EOF
export PATH="$HOME/venv/bin:\$PATH"
export RAY_AUTH_MODE=token
# The hook would install the environment again for every worker process.
export RAY_ENABLE_UV_RUN_RUNTIME_ENV=0
export TRISHUL_RUNS=${bucket%/}/runs
export MLFLOW_TRACKING_URI=http://$head:5000
EOF
grep -qsF "$environment" "$HOME/.bashrc" || echo "source $environment" >>"$HOME/.bashrc"

# rsync copies the modes of your machine, which may be less strict.
chmod 600 "$HOME/.ray/auth_token" "$HOME/.mlflow/credentials"

installed=$HOME/venv/installed-versions
if cmp -s <(cat "$project/pyproject.toml" "$project/constraints.txt") "$installed"; then
  exit 0
fi
if ! python3 -c 'import ensurepip' 2>/dev/null; then
  sudo apt-get update -qq
  sudo DEBIAN_FRONTEND=noninteractive apt-get install -y -qq python3-venv
fi
python3 -m venv "$HOME/venv"
"$HOME/venv/bin/pip" install --quiet --disable-pip-version-check \
  --constraint "$project/constraints.txt" --editable "$project[aws,cluster,minilm,privacy,quant,search]"
cat "$project/pyproject.toml" "$project/constraints.txt" >"$installed"
