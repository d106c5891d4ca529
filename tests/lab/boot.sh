# The first process of a host, in new network, PID, IPC, UTS and mount namespaces. From tests/lab/host.py come:
#   HOST_DIR   the host's folder        HOST_NAME   its name       SSHD   the program of OpenSSH's server
#   HOST_HOME  what is its /home/node   KEEP        paths that stay visible, one a line
#   HOST_TMP   what is its /tmp, nothing for an empty one of its own
set -eu
stage=/dev/shm # in none of the kept paths, so that binding these doesn't bind the stage into itself

# cover DIR MODE [WITH]: over DIR an empty file system, or the directory WITH, through which only the kept paths are
# still to be seen
cover() {
    if [ -n "${3:-}" ]; then
        mount -n --bind "$3" "$stage"
    else
        mount -n -t tmpfs -o "mode=$2" tmpfs "$stage"
    fi
    echo "$KEEP" | while IFS= read -r path; do
        case $path in "$1"/*)
            mkdir -p "$stage${path#"$1"}"
            mount -n --rbind "$path" "$stage${path#"$1"}" ;;
        esac
    done
    mount -n --move "$stage" "$1"
}

# mount -n: its own table is in /run, which changes under it
cd /
hostname "$HOST_NAME"
for file in hosts hostname passwd shadow resolv.conf nsswitch.conf; do
    [ ! -e "/etc/$file" ] || mount -n --bind "$HOST_DIR/etc/$file" "/etc/$file"
done
mount -n -t sysfs sysfs "$stage" # the old one shows the interfaces of another network
mount -n --rbind /sys/fs/cgroup "$stage/fs/cgroup"
mount -n --move "$stage" /sys
cover /tmp 1777 "${HOST_TMP:-}"
cover /var/tmp 1777
cover /run 755
cover /home 755
mkdir -p /run/sshd /home/node
mount -n --bind "$HOST_HOME" /home/node
mount -n -t tmpfs -o mode=1777 tmpfs /dev/shm

echo ready
read -r _ # until the network card is plugged in
ip -batch "$HOST_DIR/network"
exec "$SSHD" -D -e -f "$HOST_DIR/sshd_config" >/dev/null 2>>"$HOST_DIR/sshd.log" </dev/null
