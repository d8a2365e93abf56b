#!/bin/sh
# The long form of the proof with real processes: three instances, Redis, a replica, Sentinels, an upstream that counts, and one
# fault after the other. Prints a table, and fails if more ran at once than the README promises. Three minutes.
set -eu
cd "$(dirname "$0")/.."
echo "+ cargo test --locked --test integration the_table_of_faults -- --ignored --nocapture"
exec cargo test --locked --test integration the_table_of_faults -- --ignored --nocapture
