//! What surrounds HTTP: certificates, rules about header fields, and ways to the operators' listener.

use rcgen::{CertifiedKey, KeyPair, generate_simple_self_signed};
use tempfile::TempDir;

use super::*;

fn certificate() -> CertifiedKey<KeyPair> {
    generate_simple_self_signed(["localhost".to_owned()]).unwrap()
}

/// A folder with `cert.pem`, `key.pem`, `other.pem` (another key) and `empty.pem`.
fn folder() -> TempDir {
    let folder = TempDir::new().unwrap();
    let (one, other) = (certificate(), certificate());
    for (name, text) in [
        ("cert.pem", one.cert.pem()),
        ("key.pem", one.signing_key.serialize_pem()),
        ("other.pem", other.signing_key.serialize_pem()),
        ("empty.pem", String::new()),
    ] {
        std::fs::write(folder.path().join(name), text).unwrap();
    }
    folder
}

fn parse_in(folder: &TempDir, text: &str) -> Result<Config, ConfigError> {
    let name = folder.path().join("proxy.toml");
    Config::parse(name.to_str().unwrap(), text, |_| None)
}

/// The text behind the file's name in the first line of the error.
fn refused(folder: &TempDir, text: &str) -> String {
    let error = parse_in(folder, text).unwrap_err().to_string();
    let line = error.lines().next().unwrap();
    line.split_once("proxy.toml:").unwrap().1.to_owned()
}

#[test]
fn certificates_are_read_beside_the_file_and_checked() {
    let folder = folder();
    let server = |tls: &str| format!("[server]\ntls = {{ {tls} }}\n{REST}");
    for (tls, expected) in [
        ("cert = \"cert.pem\"", "2:7: server.tls.key: must be given"),
        ("key = \"key.pem\"", "2:7: server.tls.cert: must be given"),
        (
            "cert = \"no.pem\", key = \"key.pem\"",
            "2:16: server.tls.cert: must be a file that can be read: ",
        ),
        (
            "cert = \"empty.pem\", key = \"key.pem\"",
            "2:16: server.tls.cert: must be a file that holds a certificate",
        ),
        (
            "cert = \"cert.pem\", key = \"cert.pem\"",
            "2:34: server.tls.key: must be a file that holds a private key",
        ),
        (
            "cert = \"cert.pem\", key = \"other.pem\"",
            "2:34: server.tls.key: must be the key of the certificate",
        ),
        (
            "cert = \"cert.pem\", key = \"key.pem\", min_version = \"1.1\"",
            "2:59: server.tls.min_version: must be \"1.2\" or \"1.3\"",
        ),
    ] {
        let line = refused(&folder, &server(tls));
        assert!(line.starts_with(expected), "{line}");
        assert!(!line.contains(".pem"), "{line}");
    }
    let config = parse_in(&folder, &server("cert = \"cert.pem\", key = \"key.pem\"")).unwrap();
    let tls = config.server.tls.unwrap();
    assert_eq!(tls.min_version, TlsVersion::Tls12);
    assert_eq!(tls.identity.files()[0], folder.path().join("cert.pem"));
    assert!(!format!("{tls:?}").contains("key.pem"));
}

#[test]
fn what_an_upstream_is_told_of_tls_is_checked() {
    let folder = folder();
    let upstream = |scheme: &str, tls: &str| {
        format!("[upstreams.s]\nendpoints = [\"{scheme}://a\"]\ntls = {{ {tls} }}\n{REST}")
    };
    for (scheme, tls, expected) in [
        (
            "http",
            "insecure = true",
            "3:7: upstreams.s.tls: needs an endpoint that begins with https",
        ),
        (
            "https",
            "insecure = true, ca = \"cert.pem\"",
            "3:31: upstreams.s.tls.ca: says nothing beside",
        ),
        ("https", "client_cert = \"cert.pem\"", "3:7: upstreams.s.tls.client_key: must be given"),
        (
            "https",
            "client_key = \"key.pem\"",
            "3:7: upstreams.s.tls.client_cert: must be given with",
        ),
        (
            "https",
            "ca = \"key.pem\"",
            "3:14: upstreams.s.tls.ca: must be a file that holds a certificate",
        ),
        ("https", "insecure = 1", "3:20: upstreams.s.tls.insecure: must be true or false"),
    ] {
        let line = refused(&folder, &upstream(scheme, tls));
        assert!(line.starts_with(expected), "{line}");
    }
    let tls = "ca = \"cert.pem\", client_cert = \"cert.pem\", client_key = \"key.pem\"";
    let config = parse_in(&folder, &upstream("https", tls)).unwrap();
    let tls = &config.upstreams[0].tls;
    assert_eq!((tls.roots.as_ref().unwrap().len(), tls.insecure), (1, false));
    assert!(tls.identity.is_some());
}

#[test]
fn rules_about_fields_are_checked_and_tell_no_value() {
    let route =
        |rules: &str| format!("[[routes]]\nupstream = \"app\"\npath = \"/a\"\n{rules}\n{REST}");
    for (rules, expected) in [
        (
            "request_headers = { set = { \"a b\" = \"1\" } }",
            "4:29: routes[0].request_headers.set.a b: must be the name",
        ),
        (
            "request_headers = { set = { host = \"1\" } }",
            "4:29: routes[0].request_headers.set.host: must be a header of its own",
        ),
        (
            "response_headers = { remove = [\"tidegate-reason\"] }",
            "4:32: routes[0].response_headers.remove[0]: must not be one of",
        ),
        (
            "response_headers = { add = { a = \"1\\n2\" } }",
            "4:34: routes[0].response_headers.add.a: must be the value",
        ),
        (
            "request_headers = { sett = {} }",
            "4:21: routes[0].request_headers.sett: unknown key, did you mean `set`?",
        ),
        ("strip_prefix = 1", "4:16: routes[0].strip_prefix: must be true or false"),
    ] {
        let line = first_line(&route(rules));
        assert!(line.contains(expected), "{line}");
    }
    let text = REST.replace(
        "limits = [",
        "set_headers = { authorization = \"Bearer ${PASSWORD}\" }\nlimits = [",
    );
    let config = parse(&text).unwrap();
    assert!(!format!("{config:?}").contains("hunter2"));
    let broken = text.replace("${PASSWORD}", "${PASSWORD}\\u0000");
    assert!(!error_of(&broken).contains("hunter2"), "{}", error_of(&broken));
}

#[test]
fn j78_no_upstream_is_the_operators_listener() {
    let text = |admin: &str, endpoint: &str| {
        format!(
            "[admin]\nlisten = \"{admin}\"\n[upstreams.s]\nendpoints = [\"{endpoint}\"]\n{REST}"
        )
    };
    for (admin, endpoint) in [
        ("127.0.0.1:9900", "http://127.0.0.1:9900/base"),
        ("127.0.0.1:9900", "http://localhost:9900"),
        ("127.0.0.1:9900", "http://[::ffff:127.0.0.1]:9900"),
        ("127.0.0.1:9900", "http://0.0.0.0:9900"),
        ("0.0.0.0:9900", "http://127.0.0.1:9900"),
        ("[::]:80", "http://[::1]"),
        ("10.0.0.1:443", "https://10.0.0.1"),
    ] {
        let line = first_line(&text(admin, endpoint));
        assert!(line.contains("4:14: upstreams.s.endpoints[0]: must not lead"), "{line}");
    }
    for (admin, endpoint) in [
        ("127.0.0.1:9900", "http://127.0.0.1:9901"),
        ("127.0.0.1:9900", "http://10.0.0.1:9900"),
        ("127.0.0.1:443", "http://127.0.0.1"),
    ] {
        parse(&text(admin, endpoint)).unwrap();
    }
    let at_default = |admin| {
        quick(|options| {
            options.upstream = "http://127.0.0.1:9900".to_owned();
            options.admin_listen = admin;
        })
    };
    let error = at_default(None).unwrap_err().to_string();
    assert!(error.starts_with("--upstream: must not lead"), "{error}");
    let elsewhere = AdminListen::At(([127, 0, 0, 1], 9901).into());
    at_default(Some(elsewhere)).unwrap();
    at_default(Some(AdminListen::Off)).unwrap();
    let there = AdminListen::At(([127, 0, 0, 1], 9900).into());
    let error = at_default(Some(there)).unwrap_err().to_string();
    assert!(error.starts_with("--admin-listen: must not lead"), "{error}");
}
