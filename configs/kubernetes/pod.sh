#!/bin/sh
# What a pod of job.yaml runs: it lets the others in by ssh; the first one runs the study over all of them.
#   STUDY   the study file, whose launch is {kind: hostfile, hostfile: hostfile}, with the hostfile beside it
#   OUT     the study's folder, on a volume that all pods share
#   KEYS    a folder with id and id.pub, by which the pods know each other
set -eu
port=2222
umask 077
mkdir -p "$HOME/.ssh"
cp "$KEYS/id" "$HOME/.ssh/id"
cp "$KEYS/id.pub" "$HOME/.ssh/authorized_keys"
hosts=$(sed 's/#.*//' "$(dirname "$STUDY")/hostfile" | awk 'NF {print $1}')
for host in $hosts; do
    echo "[$host]:$port $(cut -d ' ' -f 1,2 "$KEYS/id.pub")"
done > "$HOME/.ssh/known_hosts"
printf 'Host *\n  Port %s\n  IdentityFile %s/.ssh/id\n  CheckHostIP no\n' "$port" "$HOME" > "$HOME/.ssh/config"
[ "$(id -u)" != 0 ] || mkdir -p -m 755 /run/sshd
cat > "$HOME/.ssh/sshd_config" <<CONFIGURATION
Port $port
HostKey $HOME/.ssh/id
AuthorizedKeysFile $HOME/.ssh/authorized_keys
PasswordAuthentication no
StrictModes no
UsePAM no
PidFile none
MaxStartups 200
CONFIGURATION
[ "$JOB_COMPLETION_INDEX" = 0 ] || exec /usr/sbin/sshd -D -e -f "$HOME/.ssh/sshd_config"
/usr/sbin/sshd -f "$HOME/.ssh/sshd_config"
for host in $hosts; do
    until ssh -o BatchMode=yes -o ConnectTimeout=5 "$host" true; do
        sleep 1  # its pod has not begun yet
    done
done
cd "$(dirname "$OUT")"
exec carbonopt run "$STUDY" --out "$OUT"
