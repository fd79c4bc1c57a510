#!/bin/sh
# Three masters of a Redis cluster in one container, from port FIRST_PORT on. Ends when one of them does.
set -eu

data=${DATA:-/data}
nodes=
for number in 0 1 2; do
    port=$((FIRST_PORT + number))
    mkdir -p "$data/$port"
    redis-server --port "$port" --dir "$data/$port" --cluster-enabled yes --cluster-announce-ip 127.0.0.1 \
        --appendonly yes --appendfsync everysec --maxmemory-policy noeviction --protected-mode no --daemonize yes \
        --logfile "$data/$port/log"
    until redis-cli -p "$port" ping >/dev/null 2>&1; do sleep 0.1; done
    nodes="$nodes 127.0.0.1:$port"
done
if redis-cli -p "$FIRST_PORT" cluster info | grep -q '^cluster_slots_assigned:0'; then
    # shellcheck disable=SC2086  # one word per node
    redis-cli --cluster create $nodes --cluster-replicas 0 --cluster-yes
fi
while redis-cli -p "$FIRST_PORT" ping >/dev/null && redis-cli -p "$((FIRST_PORT + 1))" ping >/dev/null &&
    redis-cli -p "$((FIRST_PORT + 2))" ping >/dev/null; do
    sleep 5
done
