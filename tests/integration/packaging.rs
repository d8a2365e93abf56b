//! What installs Tidegate elsewhere: the package is built and installed into another root, units are verified, manifests are read.

use std::{
    collections::BTreeSet,
    fs,
    os::unix::fs::{MetadataExt, PermissionsExt},
    path::{Path, PathBuf},
    process::Stdio,
};

use serde::Deserialize;
use serde_yaml_ng::Value;
use tempfile::TempDir;
use tokio::process::Command;

use crate::harness::within;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// What a program says; it must end well.
async fn said(command: &mut Command) -> String {
    let output = within("a program ends", command.current_dir(root()).output()).await;
    let output = output.unwrap_or_else(|error| panic!("{command:?} can't be run: {error}"));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {text}{error}");
    text
}

/// The package, built in a folder from the program under test.
async fn packed(folder: &Path) -> PathBuf {
    let mut build = Command::new("deploy/deb/build.sh");
    build.env("LEVEL", "1").arg(env!("CARGO_BIN_EXE_tidegate")).arg(folder);
    said(&mut build).await.trim().into()
}

/// The same, unpacked where it changes nothing.
async fn unpacked() -> TempDir {
    let folder = TempDir::new().unwrap();
    let package = packed(folder.path()).await;
    let root = folder.path().join("root");
    said(Command::new("dpkg-deb").arg("-R").arg(package).arg(&root)).await;
    folder
}

/// Another root, with a dpkg of its own.
struct Machine(TempDir);

impl Machine {
    fn new() -> Self {
        let root = TempDir::new().unwrap();
        for folder in ["var/lib/dpkg/info", "var/lib/dpkg/updates", "bin"] {
            fs::create_dir_all(root.path().join(folder)).unwrap();
        }
        fs::write(root.path().join("var/lib/dpkg/status"), "").unwrap();
        // Nothing that is installed there may touch the services of this machine.
        let systemctl = root.path().join("bin/systemctl");
        fs::write(
            &systemctl,
            format!("#!/bin/sh\ntouch {}\n", root.path().join("called").display()),
        )
        .unwrap();
        fs::set_permissions(&systemctl, fs::Permissions::from_mode(0o755)).unwrap();
        Self(root)
    }

    fn at(&self, path: &str) -> PathBuf {
        self.0.path().join(path)
    }

    /// What dpkg says. Its libc isn't there, nor a shell: scripts run out here, and are told of the root.
    async fn dpkg(&self, words: &[&str]) -> String {
        let is_root = fs::metadata("/proc/self").unwrap().uid() == 0;
        let mut dpkg = Command::new(if is_root { "dpkg" } else { "fakeroot" });
        if !is_root {
            dpkg.args(["--", "dpkg"]);
        }
        let path = std::env::var("PATH").unwrap();
        dpkg.env("PATH", format!("{}:{path}:/usr/sbin:/sbin", self.at("bin").display()))
            .env("DEBIAN_FRONTEND", "noninteractive")
            .stdin(Stdio::null())
            .arg(format!("--root={}", self.0.path().display()))
            .arg(format!("--log={}", self.at("log").display()))
            .args(["--force-not-root", "--force-script-chrootless", "--force-depends"])
            .args(words);
        let told = said(&mut dpkg).await;
        assert!(!self.at("called").exists(), "systemctl was called by dpkg {words:?}");
        told
    }

    /// Every file that isn't dpkg's own.
    fn files(&self) -> BTreeSet<String> {
        let mut folders = vec![self.0.path().to_owned()];
        let mut files = BTreeSet::new();
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                let name = path.strip_prefix(self.0.path()).unwrap().to_str().unwrap().to_owned();
                match path.is_dir() {
                    true if name != "var" && name != "bin" => folders.push(path),
                    false if name != "log" => _ = files.insert(name),
                    _ => {}
                }
            }
        }
        files
    }
}

#[tokio::test]
async fn the_package_is_installed_updated_and_removed() {
    let (machine, folder) = (Machine::new(), TempDir::new().unwrap());
    let package = packed(folder.path()).await;
    let package = package.to_str().unwrap();
    machine.dpkg(&["--install", package]).await;
    let state = async || machine.dpkg(&["--status", "tidegate"]).await;
    assert!(state().await.contains("Status: install ok installed"));
    let program = machine.at("usr/bin/tidegate");
    let version = said(Command::new(&program).arg("--version")).await;
    assert_eq!(version.trim(), concat!("tidegate ", env!("CARGO_PKG_VERSION")));
    let config = machine.at("etc/tidegate/proxy.toml");
    let check =
        async || said(Command::new(&program).args(["check", "--config"]).arg(&config)).await;
    assert!(check().await.contains("app"));

    // What somebody changed stays, through the same version and through a newer one with another file.
    let shipped = fs::read_to_string(&config).unwrap();
    let mine = format!("{shipped}\n# mine\n");
    fs::write(&config, &mine).unwrap();
    machine.dpkg(&["--install", package]).await;
    assert_eq!(fs::read_to_string(&config).unwrap(), mine);
    let newer = folder.path().join("newer");
    said(Command::new("dpkg-deb").args(["-R", package]).arg(&newer)).await;
    let control = newer.join("DEBIAN/control");
    let text = fs::read_to_string(&control).unwrap();
    fs::write(&control, text.replace("\nVersion: ", "\nVersion: 1:")).unwrap();
    fs::write(newer.join("etc/tidegate/proxy.toml"), format!("# newer\n{shipped}")).unwrap();
    let newer_package = folder.path().join("newer.deb");
    let mut pack = Command::new("dpkg-deb");
    said(pack.args(["-Zgzip", "-z1", "-b"]).args([&newer, &newer_package])).await;
    machine.dpkg(&["--force-confold", "--install", newer_package.to_str().unwrap()]).await;
    assert!(state().await.contains("\nVersion: 1:"));
    assert_eq!(fs::read_to_string(&config).unwrap(), mine);
    assert!(fs::read_to_string(machine.at("etc/tidegate/proxy.toml.dpkg-dist")).is_ok());
    assert!(check().await.contains("app"));

    machine.dpkg(&["--remove", "tidegate"]).await;
    let left = machine.files();
    assert!(left.iter().all(|file| file.starts_with("etc/")), "{left:?}");
    assert_eq!(fs::read_to_string(&config).unwrap(), mine);
    machine.dpkg(&["--purge", "tidegate"]).await;
    assert_eq!(machine.files(), BTreeSet::new());
}

#[tokio::test]
async fn the_package_has_all_that_it_runs_with() {
    let folder = unpacked().await;
    let at = |path: &str| folder.path().join("root").join(path);
    let version = said(Command::new(at("usr/bin/tidegate")).arg("--version")).await;
    assert_eq!(version.trim(), concat!("tidegate ", env!("CARGO_PKG_VERSION")));
    let mut check = Command::new(at("usr/bin/tidegate"));
    let report = said(check.args(["check", "--config"]).arg(at("etc/tidegate/proxy.toml"))).await;
    assert!(report.contains("app"), "{report}");
    for file in [
        "lib/systemd/system/tidegate.service",
        "lib/systemd/system/tidegate.socket",
        "usr/share/man/man1/tidegate.1.gz",
        "usr/share/bash-completion/completions/tidegate",
        "usr/share/zsh/vendor-completions/_tidegate",
        "usr/share/fish/vendor_completions.d/tidegate.fish",
        "usr/share/doc/tidegate/copyright",
        "usr/share/doc/tidegate/examples/proxy.toml",
    ] {
        assert!(fs::metadata(at(file)).unwrap().len() > 100, "{file}");
    }
    let conffiles = fs::read_to_string(at("DEBIAN/conffiles")).unwrap();
    for file in conffiles.lines() {
        assert!(at(file.trim_start_matches('/')).is_file(), "{file}");
    }
    assert!(conffiles.contains("/etc/tidegate/proxy.toml\n"));
    let control = fs::read_to_string(at("DEBIAN/control")).unwrap();
    assert!(control.contains(concat!("\nVersion: ", env!("CARGO_PKG_VERSION"), "\n")), "{control}");
    // The shell reads what it is to source.
    let script = at("usr/share/bash-completion/completions/tidegate");
    said(Command::new("bash").arg("-n").arg(script)).await;
}

#[tokio::test]
async fn systemd_takes_the_units() {
    if Command::new("systemd-analyze").arg("--version").output().await.is_err() {
        // Where there is no systemd nobody installs units; CI has one.
        return;
    }
    // The programs that they name are looked for in the root that the units are in.
    let folder = TempDir::new().unwrap();
    let at = folder.path().join("root");
    for (path, text, mode) in [
        ("usr/bin/tidegate", "#!/bin/sh\n".to_owned(), 0o755),
        ("bin/kill", "#!/bin/sh\n".to_owned(), 0o755),
        ("etc/systemd/system/tidegate.service", read("deploy/systemd/tidegate.service"), 0o644),
        ("etc/systemd/system/tidegate.socket", read("deploy/systemd/tidegate.socket"), 0o644),
    ] {
        let path = at.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
    }
    let mut verify = Command::new("systemd-analyze");
    verify.args(["verify", "--man=no", "--recursive-errors=no", "--root"]).arg(&at);
    let output = within("verify", verify.arg("tidegate.service").arg("tidegate.socket").output());
    let output = output.await.unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    let about_us: Vec<_> = text.lines().filter(|line| line.contains("tidegate.")).collect();
    assert!(about_us.is_empty(), "{about_us:?}");
    let unit = read("deploy/systemd/tidegate.service");
    let seconds = |key: &str| -> u64 {
        let line = unit.lines().find_map(|line| line.strip_prefix(key)).unwrap();
        line.trim_end_matches('s').parse().unwrap()
    };
    let defaults = tidegate::config::Config::load(&root().join("proxy.toml")).unwrap().server;
    assert!(seconds("TimeoutStopSec=") > (defaults.drain_delay + defaults.drain_timeout).as_secs());
}

fn yaml(path: &str) -> Vec<Value> {
    let text = read(path);
    let documents = serde_yaml_ng::Deserializer::from_str(&text);
    documents
        .map(|document| {
            let mut value = Value::deserialize(document).unwrap_or_else(|e| panic!("{path}: {e}"));
            value.apply_merge().unwrap();
            value
        })
        .collect()
}

fn list(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_sequence().map(Vec::as_slice).unwrap_or_default().iter()
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_else(|| panic!("{value:?} isn't a text"))
}

#[test]
fn compose_names_files_and_services_that_exist() {
    let compose = yaml("docker-compose.yml").remove(0);
    let services = compose["services"].as_mapping().unwrap();
    let names: BTreeSet<&str> = services.keys().map(text).collect();
    for name in ["redis", "tidegate-a", "tidegate-b", "prometheus", "grafana"] {
        assert!(names.contains(name), "{name} in {names:?}");
    }
    let mut ports = BTreeSet::new();
    for service in services.values() {
        for volume in list(&service["volumes"]) {
            let (from, to) = text(volume).split_once(':').unwrap();
            assert!(root().join(from).exists(), "{from}");
            assert!(to.starts_with('/') && to.ends_with(":ro"), "{to}");
        }
        if let Some(file) = service["build"]["dockerfile"].as_str() {
            assert!(root().join(file).is_file(), "{file}");
        }
        for port in list(&service["ports"]) {
            assert!(
                ports.insert(text(port).split_once(':').unwrap().0.to_owned()),
                "{port:?} twice"
            );
        }
        let needed = list(&service["depends_on"]).map(text);
        let named =
            service["depends_on"].as_mapping().into_iter().flat_map(|map| map.keys().map(text));
        for name in needed.chain(named) {
            assert!(names.contains(name), "{name} in {names:?}");
        }
    }
    for url in ["redis://redis:6379", "http://upstream:3000"] {
        assert!(read("deploy/compose.toml").contains(url), "{url}");
    }
    let scraped = yaml("deploy/prometheus/prometheus.yml").remove(0);
    let targets = &scraped["scrape_configs"][0]["static_configs"][0]["targets"];
    for target in list(targets) {
        assert!(names.contains(text(target).strip_suffix(":9900").unwrap()), "{target:?}");
    }
    let source = yaml("deploy/grafana/provisioning/datasources/prometheus.yml").remove(0);
    assert_eq!(text(&source["datasources"][0]["url"]), "http://prometheus:9090");
    let dashboards = yaml("deploy/grafana/provisioning/dashboards/tidegate.yml").remove(0);
    let folder = text(&dashboards["providers"][0]["options"]["path"]);
    assert!(
        read("docker-compose.yml").contains(&format!(":{folder}/tidegate.json:ro")),
        "{folder}"
    );
}

#[tokio::test]
async fn the_balancers_configuration_is_one() {
    said(Command::new("haproxy").args(["-c", "-f", "deploy/haproxy.cfg"])).await;
}

#[test]
fn the_image_copies_what_is_there_and_starts_what_exists() {
    let dockerfile = read("deploy/Dockerfile");
    let copied = dockerfile.lines().filter_map(|line| line.strip_prefix("COPY "));
    let copied = copied.filter(|line| !line.starts_with("--from"));
    let copied: Vec<&str> = copied.flat_map(|line| line.split(' ').rev().skip(1)).collect();
    assert!(copied.contains(&"src"), "{copied:?}");
    for path in copied {
        assert!(root().join(path).exists(), "{path}");
    }
    // What the manifest names must be there, or nothing is built.
    for path in ["benches", "scripts", "README.md", "ARCHITECTURE.md"] {
        assert!(dockerfile.contains(path), "{path}");
    }
    let rust = env!("CARGO_PKG_RUST_VERSION");
    assert!(dockerfile.starts_with(&format!("FROM rust:{rust}-")), "rust-version is {rust}");
}

#[test]
fn the_manifests_fit_together() {
    let all = yaml("deploy/kubernetes/tidegate.yaml");
    let of_kind = |kind: &str| {
        let found = all.iter().find(|one| one["kind"] == kind);
        found.unwrap_or_else(|| panic!("no {kind}"))
    };
    let config = text(&of_kind("ConfigMap")["data"]["proxy.toml"]);
    let config = tidegate::config::Config::parse("proxy.toml", config, |name| {
        (name == "REDIS_URL").then(|| "redis://redis:6379".to_owned())
    })
    .unwrap();

    let deployment = of_kind("Deployment");
    let pod = &deployment["spec"]["template"]["spec"];
    let container = &pod["containers"][0];
    let port = |name: &str| {
        let port = list(&container["ports"]).find(|port| port["name"] == name);
        port.and_then(|port| port["containerPort"].as_u64()).unwrap_or_default()
    };
    assert_eq!(port("http"), u64::from(config.server.listen.port()));
    assert_eq!(port("admin"), u64::from(config.admin.unwrap().listen.port()));
    for (probe, path) in
        [("startupProbe", "/livez"), ("livenessProbe", "/livez"), ("readinessProbe", "/readyz")]
    {
        assert_eq!(container[probe]["httpGet"]["path"], path, "{probe}");
        assert_eq!(container[probe]["httpGet"]["port"], "admin", "{probe}");
    }
    let slept: u64 =
        text(&container["lifecycle"]["preStop"]["exec"]["command"][1]).parse().unwrap();
    let drain = (config.server.drain_delay + config.server.drain_timeout).as_secs();
    assert!(pod["terminationGracePeriodSeconds"].as_u64().unwrap() > slept + drain);

    let labels = &deployment["spec"]["template"]["metadata"]["labels"];
    for (kind, selector) in [
        ("Deployment", &["selector", "matchLabels"][..]),
        ("Service", &["selector"]),
        ("PodDisruptionBudget", &["selector", "matchLabels"]),
        ("NetworkPolicy", &["podSelector", "matchLabels"]),
    ] {
        let wanted = selector.iter().fold(&of_kind(kind)["spec"], |value, key| &value[*key]);
        assert_eq!(wanted, labels, "{kind}");
    }
    let (secret, key) = (of_kind("Secret"), &container["env"][0]["valueFrom"]["secretKeyRef"]);
    assert_eq!(secret["metadata"]["name"], key["name"]);
    assert!(secret["stringData"].get(text(&key["key"])).is_some(), "{key:?}");
}
