#!/bin/sh
# Replace containers of services by new ones, with the image that the compose files now specify, without losing requests.
#
#   deploy/compose/upgrade.sh [--one-by-one] SERVICE…
#
# New containers are started next to the old ones. Once they are healthy, the old ones get SIGTERM and finish their requests.
# With --one-by-one, an old container is stopped before its successor is started: for workers with their own GPUs, and for
# members of etcd and NATS. Set files and project by Compose's own variables, such as COMPOSE_FILE=a.yml:b.yml.
# COMPOSE_COMMAND is the command, by default `docker compose`.
set -eu

compose=${COMPOSE_COMMAND:-docker compose}
one_by_one=no
if [ "${1:-}" = --one-by-one ]; then
  one_by_one=yes
  shift
fi
if [ $# -eq 0 ]; then
  echo "usage: $0 [--one-by-one] SERVICE…" >&2
  exit 2
fi

for service in "$@"; do
  old=$($compose ps --quiet "$service")
  count=$(echo "$old" | grep -c .) || {
    echo "$service has no running container: start it with $compose up $service" >&2
    exit 1
  }
  if [ "$one_by_one" = yes ]; then
    for container in $old; do
      docker stop "$container" > /dev/null  # waits for stop_grace_period
      docker rm "$container" > /dev/null
      $compose up --detach --no-deps --no-recreate --wait --scale "$service=$count" "$service"
    done
  else
    $compose up --detach --no-deps --no-recreate --wait --scale "$service=$((2 * count))" "$service"
    docker stop $old > /dev/null
    docker rm $old > /dev/null
  fi
done
