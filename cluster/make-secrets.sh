#!/usr/bin/env bash
# Create the two secrets of a cluster on your machine, unless they exist:
#
#   ~/.ray/auth_token        token that allows running programs on the cluster
#   ~/.mlflow/credentials    user and password of MLflow's server
#
# Ray and MLflow read these files. `ray up` copies them to the nodes (file_mounts).
set -euo pipefail
umask 077

token=$HOME/.ray/auth_token
if [ ! -s "$token" ]; then
  mkdir -p "$(dirname "$token")"
  python3 -c 'import secrets; print(secrets.token_hex(32), end="")' >"$token"
  echo "created $token"
fi

credentials=$HOME/.mlflow/credentials
if [ ! -s "$credentials" ]; then
  mkdir -p "$(dirname "$credentials")"
  password=$(python3 -c 'import secrets; print(secrets.token_urlsafe(24))')
  printf '[mlflow]\nmlflow_tracking_username = trishul\nmlflow_tracking_password = %s\n' \
    "$password" >"$credentials"
  echo "created $credentials"
fi
chmod 600 "$token" "$credentials"
