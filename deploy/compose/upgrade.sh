#!/bin/sh
# Replace the containers of services by new ones, of the image that the compose files name now, without losing a request.
#
#   deploy/compose/upgrade.sh [--one-by-one] SERVICE…
#
# New containers start beside the old ones; once they are healthy, the old ones get SIGTERM and finish what they have.
# With --one-by-one an old container leaves before its successor comes: for workers that have a GPU of their own, and for
# members of etcd and NATS. Compose's own variables name the files and the project: COMPOSE_FILE=a.yml:b.yml.
# COMPOSE_COMMAND is the command, `docker compose` by default.
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
