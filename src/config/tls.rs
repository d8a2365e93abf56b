//! Certificates and keys, read from their files and checked.
//!
//! An `Err` is the rule that was broken, and names no contents.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::SystemTime,
};

use rustls::{
    RootCertStore,
    crypto::aws_lc_rs,
    pki_types::{CertificateDer, PrivateKeyDer, pem, pem::PemObject},
    sign::CertifiedKey,
};

/// `tls` of `[server]`
#[derive(Clone, Debug, PartialEq)]
pub struct ServerTls {
    /// What clients are shown.
    pub identity: Identity,
    /// The lowest version that is spoken.
    pub min_version: TlsVersion,
}

/// `min_version`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TlsVersion {
    /// 1.2
    Tls12,
    /// 1.3
    Tls13,
}

/// `tls` of `[upstreams.<name>]`
#[derive(Clone, Debug, Default)]
pub struct UpstreamTls {
    /// Who is trusted; the system's roots if not said.
    pub roots: Option<Arc<RootCertStore>>,
    /// What the upstream is shown if it asks.
    pub identity: Option<Identity>,
    /// Whether any certificate will do.
    pub insecure: bool,
}

/// A certificate with its key, and the files both came from.
#[derive(Clone)]
pub struct Identity {
    cert: PathBuf,
    key: PathBuf,
    certified: Arc<CertifiedKey>,
    stamps: Stamps,
}

/// When certificate and key were written, and how long they are.
pub type Stamps = [Option<(SystemTime, u64)>; 2];

impl Identity {
    /// Puts together what belongs together.
    pub(super) fn new(
        (cert, chain): (PathBuf, Vec<CertificateDer<'static>>),
        (key, private): (PathBuf, PrivateKeyDer<'static>),
        stamps: Stamps,
    ) -> Result<Self, String> {
        let provider = aws_lc_rs::default_provider();
        let certified = CertifiedKey::from_der(chain, private, &provider)
            .map_err(|_| "must be the key of the certificate, of a kind that is known")?;
        Ok(Self { cert, key, certified: Arc::new(certified), stamps })
    }

    /// Reads both files once more.
    ///
    /// # Errors
    /// What is wrong with them now.
    pub fn again(&self) -> Result<Self, String> {
        let stamps = self.stamps_now();
        let chain = chain(&self.cert).map_err(|rule| format!("the certificate {rule}"))?;
        let key = key(&self.key).map_err(|rule| format!("the key {rule}"))?;
        Self::new((self.cert.clone(), chain), (self.key.clone(), key), stamps)
            .map_err(|rule| format!("the key {rule}"))
    }

    /// The files of the certificate and of its key.
    pub fn files(&self) -> [&Path; 2] {
        [&self.cert, &self.key]
    }

    /// The files when they were about to be read.
    pub fn stamps(&self) -> Stamps {
        self.stamps
    }

    /// The files as they are.
    pub fn stamps_now(&self) -> Stamps {
        stamps(self.files())
    }

    /// What a handshake needs.
    pub fn certified(&self) -> Arc<CertifiedKey> {
        Arc::clone(&self.certified)
    }
}

impl PartialEq for Identity {
    /// A key fits its certificate, so it needs no look.
    fn eq(&self, other: &Self) -> bool {
        self.files() == other.files() && self.certified.cert == other.certified.cert
    }
}

impl PartialEq for UpstreamTls {
    fn eq(&self, other: &Self) -> bool {
        let trusted = |tls: &Self| tls.roots.as_ref().map(|roots| roots.roots.clone());
        trusted(self) == trusted(other)
            && self.identity == other.identity
            && self.insecure == other.insecure
    }
}

impl std::fmt::Debug for Identity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Identity").field("cert", &self.cert).finish_non_exhaustive()
    }
}

pub(super) fn stamps(files: [&Path; 2]) -> Stamps {
    files.map(|file| {
        let metadata = std::fs::metadata(file).ok()?;
        Some((metadata.modified().ok()?, metadata.len()))
    })
}

/// The certificates of a file, the first one's own first.
pub(super) fn chain(file: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    let certificates = CertificateDer::pem_file_iter(file).and_then(Iterator::collect);
    let certificates: Vec<_> = certificates.map_err(unread)?;
    if certificates.is_empty() {
        return Err("must be a file that holds a certificate in PEM".to_owned());
    }
    Ok(certificates)
}

pub(super) fn key(file: &Path) -> Result<PrivateKeyDer<'static>, String> {
    PrivateKeyDer::from_pem_file(file).map_err(|error| match error {
        pem::Error::NoItemsFound => "must be a file that holds a private key in PEM".to_owned(),
        error => unread(error),
    })
}

pub(super) fn roots(file: &Path) -> Result<Arc<RootCertStore>, String> {
    let mut roots = RootCertStore::empty();
    for certificate in chain(file)? {
        roots.add(certificate).map_err(|_| "holds a certificate that can't be read")?;
    }
    Ok(Arc::new(roots))
}

fn unread(error: pem::Error) -> String {
    match error {
        pem::Error::Io(error) => format!("must be a file that can be read: {error}"),
        _ => "must be a file in PEM".to_owned(),
    }
}
