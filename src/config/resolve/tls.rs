//! TLS on both sides. Paths count from the folder of the configuration file.

use std::path::{Path, PathBuf};

use toml::Spanned;

use super::{At, Found, or_text, required};
use crate::config::{
    Identity, ServerTls, UpstreamTls,
    error::Problem,
    file::{FileServerTls, FileUpstreamTls},
    rules, tls,
};

pub(super) fn server(file: &Spanned<FileServerTls>, folder: &Path) -> Found<ServerTls> {
    let FileServerTls { cert, key, min_version } = file.get_ref();
    let cert = required(file.span(), cert, "cert")?;
    let key = required(file.span(), key, "key")?;
    Ok(ServerTls {
        identity: identity(cert, key, folder)?,
        min_version: or_text(min_version, "1.2", rules::tls_version)?,
    })
}

pub(super) fn upstream(
    file: &Option<Spanned<FileUpstreamTls>>,
    is_https: bool,
    folder: &Path,
) -> Found<UpstreamTls> {
    let Some(file) = file else {
        return Ok(UpstreamTls::default());
    };
    if !is_https {
        let rule = "needs an endpoint that begins with https://";
        return Err(Problem::new(file.span(), rule));
    }
    let FileUpstreamTls { ca, client_cert, client_key, insecure } = file.get_ref();
    let insecure = insecure.as_ref().is_some_and(|insecure| *insecure.get_ref());
    if let Some(ca) = ca.as_ref().filter(|_| insecure) {
        return Err(Problem::new(ca.span(), "says nothing beside `insecure`, which trusts anyone"));
    }
    let roots = ca.as_ref().map(|ca| tls::roots(&path(ca, folder)).at(ca.span()));
    let identity = match (client_cert, client_key) {
        (None, None) => None,
        (Some(cert), key) => {
            let key = required(file.span(), key, "client_key")?;
            Some(identity(cert, key, folder)?)
        }
        (None, Some(_)) => {
            let rule = "must be given with client_key";
            return Err(Problem::missing(file.span(), "client_cert", rule));
        }
    };
    Ok(UpstreamTls { roots: roots.transpose()?, identity, insecure })
}

fn identity(cert: &Spanned<String>, key: &Spanned<String>, folder: &Path) -> Found<Identity> {
    let (cert_path, key_path) = (path(cert, folder), path(key, folder));
    let stamps = tls::stamps([&cert_path, &key_path]);
    let chain = tls::chain(&cert_path).at(cert.span())?;
    let private = tls::key(&key_path).at(key.span())?;
    Identity::new((cert_path, chain), (key_path, private), stamps).at(key.span())
}

fn path(text: &Spanned<String>, folder: &Path) -> PathBuf {
    folder.join(text.get_ref())
}
