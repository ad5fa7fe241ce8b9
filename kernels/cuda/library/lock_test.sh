#!/bin/sh
# lock_test.sh LOCK MADE all|sample: whether kernels.lock says what the compiler did. MADE is the lock of the kernels that
# this build compiled: all of them, or the sample.
lock=$1 made=$2 kernels=$3
LC_ALL=C sort "$lock" > "$TEST_TMPDIR/lock"
LC_ALL=C sort "$made" > "$TEST_TMPDIR/made"
case $kernels in
  all) differing=$(diff "$TEST_TMPDIR/lock" "$TEST_TMPDIR/made") ;;
  sample) differing=$(LC_ALL=C comm -13 "$TEST_TMPDIR/lock" "$TEST_TMPDIR/made") ;;
esac
rows=$(grep -c '^sm_' "$made")
[ "$rows" -ge 100 ] || { echo "lock_test: only $rows kernels were compiled"; exit 1; }
[ -n "$differing" ] || exit 0
echo "lock_test: kernels.lock is not of this device code. Run ./dev lock, and see what changed by git diff. It differs in:"
echo "$differing" | head -50
exit 1
