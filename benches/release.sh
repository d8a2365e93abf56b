#!/bin/sh
# Builds target/trained/tidegate, laid out by what runs under load: a first program counts that while the short form of the
# benchmark goes through it, and a second one is compiled by these counts (profile-guided optimization). It takes three
# times as long as `cargo build --release`, since the benchmark is built as well, and some minutes of load.
set -eu
cd "$(dirname "$0")/.."
benches/install.sh

target=$(rustc -vV | sed -n 's/^host: //p')
merge=$(rustc --print sysroot)/lib/rustlib/$target/bin/llvm-profdata
[ -x "$merge" ] || rustup component add llvm-tools || {
    echo "release: llvm-profdata of the compiler's own LLVM is missing: rustup component add llvm-tools" >&2
    exit 1
}

out=$PWD/target/pgo
counts=$out/counts.profdata
# With the target named, the flags are those of the program alone, and not of what runs during the build; and without the bench
# beside it, whose dependencies' features would change the program.
build() {
    RUSTFLAGS="${RUSTFLAGS:-} $2" cargo build --release --locked --bin tidegate --target "$target" --target-dir "$out/$1"
}

counting=$out/counting/$target/release/tidegate
build counting "-Cprofile-generate=$out/raw"
if [ -z "$(find "$counts" -newer "$counting" 2> /dev/null)" ]; then
    rm -rf "$out/raw" "$out/trained"
    install -D "$counting" target/bench/tidegate
    echo "training: what it says is in $out/training.log"
    (
        ulimit -n "$(ulimit -Hn)"
        export LLVM_PROFILE_FILE="$out/raw/%m.profraw" BENCH_SHORT=1 BENCH_ROUNDS=1 BENCH_SECONDS=1
        BENCH_ONLY=throughput,tls,http2,streams,transfer,handover cargo bench --locked --bench compare
    ) > "$out/training.log" 2>&1 || {
        tail -20 "$out/training.log" >&2
        exit 1
    }
    # Figures of a program that counts are none.
    rm -f target/bench/report-throughput-tls-*
    "$merge" merge -o "$counts" "$out"/raw/*.profraw
fi
build trained "-Cprofile-use=$counts"
install -D "$out/trained/$target/release/tidegate" target/trained/tidegate
