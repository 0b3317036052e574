#!/usr/bin/env bash
# Start MLflow's tracking server in the background, with authentication, unless it is running.
#
#   start.sh ARTIFACTS    folder or bucket of its files, e.g. s3://my-trishul-results/mlflow
#
#   MLFLOW_STORE    database; default SQLite in the server's folder, or postgresql:///mlflow (pip
#                   install psycopg2-binary; PGHOST, PGUSER; the password goes into ~/.pgpass)
#   MLFLOW_FOLDER   the server's folder; default ~/mlflow
#   MLFLOW_HOST     address to listen on; default all addresses. The cluster's firewall admits only
#                   its nodes and SSH (cluster/aws-account.yaml).
#   MLFLOW_PORT     default 5000
#
# The server reads user and password from ~/.mlflow/credentials, like MLflow's clients, when it starts
# for the first time. To change them later, use `mlflow.server.auth.client`.
set -euo pipefail
umask 077

artifacts=${1:?usage: start.sh ARTIFACTS}
folder=${MLFLOW_FOLDER:-$HOME/mlflow}
mkdir -p "$folder"

# The running server locks this file.
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
# Check the slow hash of a password every five minutes instead of in every request.
auth_cache_ttl_seconds = 300
EOF
export MLFLOW_AUTH_CONFIG_PATH=$folder/auth.ini
export MLFLOW_DISABLE_TELEMETRY=true
# Without this setting, MLflow would start eight processes of 200 MB each for jobs, which are not used.
export MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false

# The key signs the forms of the web pages.
[ -s "$folder/secret-key" ] || python3 -c 'import secrets; print(secrets.token_hex(32))' >"$folder/secret-key"
MLFLOW_FLASK_SERVER_SECRET_KEY=$(cat "$folder/secret-key")
export MLFLOW_FLASK_SERVER_SECRET_KEY

serve() {
  # Restart a failed server: trials wait for it and repeat failed requests. On a busy head, imports
  # take a worker longer than 5 s, after which uvicorn would replace it by default.
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
