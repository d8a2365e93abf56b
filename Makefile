.PHONY: bench

# Tidegate beside HAProxy, nginx and nginx with a semaphore in Lua; see benches/compare/main.rs.
# The program is built without the bench's own dependencies, whose features would change it.
bench:
	benches/install.sh
	cargo build --release --bin tidegate
	install -D target/release/tidegate target/bench/tidegate
	ulimit -n $$(ulimit -Hn) && cargo bench --bench compare
