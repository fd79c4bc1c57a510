#!/bin/bash
# Succeeds once Aerospike takes requests. Asks by its info protocol, because not every image has asinfo: a header of
# version 2, type 1 and a length of six bytes, then the command.
set -eu

exec 3<>"/dev/tcp/127.0.0.1/${AEROSPIKE_PORT:-3000}"
printf '\2\1\0\0\0\0\0\7status\n' >&3
timeout 5 head -c 17 <&3 | tail -c 9 | tr '\t' ' ' | grep -q '^status ok'
