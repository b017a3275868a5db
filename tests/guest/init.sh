#!/bin/busybox sh
# The guest's initramfs: makes a root of the host's own, with the layer over it and a tmpfs over both, and goes there.
# /settings says what differs from guest to guest: SYSTEMD (1 or empty), PYTHON, GUESTD, CHECKOUT.
B=/bin/busybox
. /settings
$B mkdir -p /proc /sys /dev /host /layer /writable /root
$B mount -t proc proc /proc
$B mount -t sysfs sysfs /sys
$B mount -t devtmpfs dev /dev
for module in $MODULES; do $B insmod "/modules/$module" || echo "init: no $module"; done

nine() { $B mount -t 9p -o "trans=virtio,version=9p2000.L,ro,msize=524288,cache=loose" "$1" "$2"; }
nine host /host && nine layer /layer || echo "init: the host's files are not there"
$B mount -t tmpfs -o mode=755 tmpfs /writable
$B mkdir /writable/upper /writable/work
$B mount -t overlay -o lowerdir=/layer:/host,upperdir=/writable/upper,workdir=/writable/work overlay /root || echo "init: no root"

for directory in proc sys dev; do $B mkdir -p "/root/$directory"; $B mount --move "/$directory" "/root/$directory"; done
$B mkdir /checkout && $B mount --bind "/root$CHECKOUT" /checkout # it may lie below what is covered now
for directory in run tmp dev/shm; do $B mkdir -p "/root/$directory"; $B mount -t tmpfs -o mode=1777 tmpfs "/root/$directory"; done
$B mkdir -p "/root$CHECKOUT" && $B mount --move /checkout "/root$CHECKOUT"
$B chmod 755 /root/run
$B mkdir -p /root/dev/pts && $B mount -t devpts devpts /root/dev/pts
$B mount -t cgroup2 cgroup2 /root/sys/fs/cgroup
$B rm -f /root/.dockerenv /root/run/.containerenv  # systemd would think it is in a container
$B ip link set lo up

if [ -n "$SYSTEMD" ]; then
    units=/root/run/systemd/system
    $B mkdir -p $units /root/run/systemd/system-generators
    for generator in /root/lib/systemd/system-generators/*; do # they take 5 s, and know only of the host's services
        $B ln -s /dev/null "/root/run/systemd/system-generators/${generator##*/}"
    done
    printf '[Unit]\nWants=guestd.service systemd-journald.service\n' > $units/guest.target
    printf '[Unit]\nDefaultDependencies=no\n[Service]\nExecStart=%s %s\n' "$PYTHON" "$GUESTD" > $units/guestd.service
    exec $B switch_root /root /lib/systemd/systemd --show-status=no --unit=guest.target
fi
exec $B switch_root /root "$PYTHON" "$GUESTD"
