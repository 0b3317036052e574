#!/usr/bin/env bash
# Start MLflow's tracking server in the background, with authentication; do nothing if it runs.
#
#   start.sh ARTIFACTS    folder or bucket of its files, e.g. s3://my-trishul-results/mlflow
#
#   MLFLOW_STORE    database; default SQLite in the server's folder, or postgresql:///mlflow (pip
#                   install psycopg2-binary; PGHOST, PGUSER; the password goes into ~/.pgpass)
#   MLFLOW_FOLDER   the server's folder; default ~/mlflow
#   MLFLOW_HOST     address to listen on; default all of this machine's. The cluster's firewall lets
#                   only its nodes and SSH in (cluster/aws-account.yaml).
#   MLFLOW_PORT     default 5000
#
# User and password are those of ~/.mlflow/credentials, which MLflow's clients read, too. They are
# used when the server starts for the first time; `mlflow.server.auth.client` changes them later.
set -euo pipefail
umask 077

artifacts=${1:?usage: start.sh ARTIFACTS}
folder=${MLFLOW_FOLDER:-$HOME/mlflow}
mkdir -p "$folder"

# The server holds the lock as long as it runs.
exec 9>"$folder/lock"
flock --nonblock 9 || exit 0

credential() { sed -n "s/^mlflow_tracking_$1 *= *//p" "$HOME/.mlflow/credentials"; }
MLFLOW_AUTH_ADMIN_USERNAME=$(credential username)
MLFLOW_AUTH_ADMIN_PASSWORD=$(credential password)
export MLFLOW_AUTH_ADMIN_USERNAME MLFLOW_AUTH_ADMIN_PASSWORD

cat >"$folder/auth.ini" <<EOF
[mlflow]
database_uri = sqlite:///$folder/users.db
default_permission = NO_PERMISSIONS
# Check a password's slow hash once in five minutes instead of with every request.
auth_cache_ttl_seconds = 300
EOF
export MLFLOW_AUTH_CONFIG_PATH=$folder/auth.ini
export MLFLOW_DISABLE_TELEMETRY=true
# Nobody sends MLflow jobs, for which it would start eight processes of 200 MB each.
export MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false

# Signs the forms of the web pages.
[ -s "$folder/secret-key" ] || python3 -c 'import secrets; print(secrets.token_hex(32))' >"$folder/secret-key"
MLFLOW_FLASK_SERVER_SECRET_KEY=$(cat "$folder/secret-key")
export MLFLOW_FLASK_SERVER_SECRET_KEY

serve() {
  # A server that dies comes back. A trial waits for it, and sends again what it missed. On a busy
  # head, importing takes a worker longer than the 5 s after which uvicorn would replace it.
  while true; do
    mlflow server --app-name basic-auth \
      --host "${MLFLOW_HOST:-0.0.0.0}" --port "${MLFLOW_PORT:-5000}" --workers 2 \
      --backend-store-uri "${MLFLOW_STORE:-sqlite:///$folder/mlflow.db}" \
      --artifacts-destination "$artifacts" \
      --uvicorn-opts "--timeout-worker-healthcheck 60" 9>&- || true
    sleep 2 9>&-
  done
}
cd "$folder"
export -f serve
export artifacts folder
nohup setsid bash -c serve >>"$folder/server.log" 2>&1 </dev/null &
echo $! >"$folder/pid"
