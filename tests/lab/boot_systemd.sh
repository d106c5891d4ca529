# The first process of a host on which systemd runs, log-ins and all, in namespaces as for boot.sh. From tests/lab/host.py
# come the variables of boot.sh and:
#   CGROUP     the name of its cgroup      SYSTEMD   the program of systemd
set -eu
if [ $# -eq 0 ]; then
    all=/sys/fs/cgroup/unified
    [ -d "$all" ] || all=/sys/fs/cgroup
    mkdir "$all/$CGROUP"
    echo 0 >"$all/$CGROUP/cgroup.procs"
    exec unshare --cgroup sh "$0" in-its-cgroup
fi

# this machine's files under those that the host writes itself, in a mount that is forgotten with its namespace
over=$HOST_DIR/over root=$HOST_DIR/over/root
cd /
hostname "$HOST_NAME"
mkdir -p "$over"
mount -n -t tmpfs tmpfs "$over"
mkdir "$over/upper" "$over/work" "$root"
mount -n -t overlay -o "lowerdir=/,upperdir=$over/upper,workdir=$over/work" overlay "$root"

mount -n -t proc proc "$root/proc"
mount -n --bind "$root/proc/sys" "$root/proc/sys"
mount -n -o remount,bind,ro "$root/proc/sys"
mount -n -t sysfs -o ro sysfs "$root/sys"
mount -n -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
mount -n -t tmpfs -o mode=755 tmpfs "$root/dev"
for device in null zero full random urandom tty; do
    touch "$root/dev/$device"
    mount -n --bind "/dev/$device" "$root/dev/$device"
done
mkdir "$root/dev/pts" "$root/dev/shm"
mount -n -t devpts -o newinstance,ptmxmode=0666,mode=620 devpts "$root/dev/pts"
ln -s pts/ptmx "$root/dev/ptmx"
ln -s /proc/self/fd "$root/dev/fd"
for folder in dev/shm tmp var/tmp; do mount -n -t tmpfs -o mode=1777 tmpfs "$root/$folder"; done
for folder in run var/lib/systemd var/log; do mount -n -t tmpfs -o mode=755 tmpfs "$root/$folder"; done
echo "$KEEP" | while IFS= read -r path; do
    mkdir -p "$root$path"
    mount -n --rbind "$path" "$root$path"
done
mkdir -p "$root/run/sshd" "$root/home/node"
mount -n --bind "$HOST_HOME" "$root/home/node"
for file in hosts hostname passwd shadow resolv.conf nsswitch.conf; do cp "$HOST_DIR/etc/$file" "$root/etc/$file"; done

units=$root/etc/lab-units
mkdir "$units" "$root/etc/systemd/logind.conf.d"
cp "$HOST_DIR/etc/logind.conf" "$root/etc/systemd/logind.conf.d/lab.conf"
for unit in systemd-udevd.service systemd-udevd-kernel.socket systemd-udevd-control.socket systemd-udev-trigger.service \
    systemd-sysctl.service systemd-modules-load.service systemd-remount-fs.service systemd-binfmt.service \
    systemd-hwdb-update.service systemd-journal-flush.service systemd-random-seed.service dev-hugepages.mount \
    dev-mqueue.mount sys-kernel-debug.mount sys-kernel-tracing.mount proc-sys-fs-binfmt_misc.automount; do
    ln -s /dev/null "$units/$unit"
done
cat >"$units/lab.target" <<END
[Unit]
Requires=basic.target
Wants=dbus.service systemd-logind.service systemd-user-sessions.service lab-sshd.service
After=basic.target
END
cat >"$units/lab-sshd.service" <<END
[Unit]
After=systemd-logind.service systemd-user-sessions.service
[Service]
ExecStart=$SSHD -D -e -f $HOST_DIR/sshd_config
KillMode=process
StandardError=append:$HOST_DIR/sshd.log
END
printf 'account required pam_permit.so\nsession required pam_systemd.so\n' >"$root/etc/pam.d/sshd"

echo ready
read -r _ # until the network card is plugged in
ip -batch "$HOST_DIR/network"
cd "$root"
mkdir -p before
pivot_root . before
umount -n -l /before
exec env -i container=other "PATH=$PATH" SYSTEMD_UNIT_PATH=/etc/lab-units:/lib/systemd/system \
    setpriv --bounding-set -sys_time,-sys_module,-sys_rawio,-syslog \
    "$SYSTEMD" --system --unit=lab.target --log-target=console --show-status=no >/dev/null 2>&1 </dev/null
