.PHONY: demo test release bench plot deb docs

# A sample provider, two instances, traffic, a live table; nothing to install.
demo:
	cargo run --release -- demo

# Every test; installs redis-server where it is missing.
test:
	tests/run.sh

# target/trained/tidegate: what is released, compiled by what runs under load.
release:
	benches/release.sh

# Tidegate beside HAProxy, nginx and nginx with a semaphore in Lua; see benches/compare/main.rs.
PROGRAM = target/trained/tidegate
bench: $(if $(filter target/trained/%,$(PROGRAM)),release)
	benches/install.sh
	install -D $(PROGRAM) target/bench/tidegate
	ulimit -n $$(ulimit -Hn) && cargo bench --bench compare

# Draws what `make bench` saved, into docs/images.
plot:
	cargo bench --bench compare -- plot

# A Debian package in target/debian.
deb: release
	deploy/deb/build.sh target/trained/tidegate

# Writes anew what the program says about its keys and its command line.
docs:
	UPDATE_DOCS=1 cargo test --locked --lib config::keys
	UPDATE_DOCS=1 cargo test --locked --test integration the_page_of_the_command_line
