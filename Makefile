.PHONY: demo test bench plot deb docs

# A sample provider, two instances, traffic, a live table; nothing to install.
demo:
	cargo run --release -- demo

# Every test; installs redis-server where it is missing.
test:
	tests/run.sh

# Tidegate beside HAProxy, nginx and nginx with a semaphore in Lua; see benches/compare/main.rs.
# The program is built without the bench's own dependencies, whose features would change it.
bench:
	benches/install.sh
	cargo build --release --bin tidegate
	install -D target/release/tidegate target/bench/tidegate
	ulimit -n $$(ulimit -Hn) && cargo bench --bench compare

# Draws what `make bench` saved, into docs/images.
plot:
	cargo bench --bench compare -- plot

# A Debian package in target/debian.
deb:
	cargo build --release --locked --bin tidegate
	deploy/deb/build.sh

# Writes anew what the program says about its keys and its command line.
docs:
	UPDATE_DOCS=1 cargo test --locked --lib config::keys
	UPDATE_DOCS=1 cargo test --locked --test integration the_page_of_the_command_line
