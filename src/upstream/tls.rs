//! TLS to upstreams: whom to trust, and as whom to come.
//!
//! The name that is asked for and verified is the endpoint's, be it a name or an address; never the
//! one that a client sent as `Host`.

use std::sync::Arc;

use hyper_rustls::ConfigBuilderExt;
use rustls::{
    ClientConfig, ConfigBuilder, DigitallySignedStruct, Error, RootCertStore, SignatureScheme,
    WantsVerifier,
    client::{
        WantsClientCert,
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    },
    crypto::{self, CryptoProvider, aws_lc_rs},
    pki_types::{CertificateDer, ServerName, UnixTime},
    sign::SingleCertAndKey,
};

use crate::config::UpstreamTls;

/// Without TLS the system's roots aren't read at all.
pub(super) fn config(is_used: bool, settings: &UpstreamTls, alpn: &[&[u8]]) -> ClientConfig {
    let provider = Arc::new(aws_lc_rs::default_provider());
    let builder = ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .expect("the provider knows the default versions");
    let builder = if settings.insecure {
        builder.dangerous().with_custom_certificate_verifier(Arc::new(Anyone(provider)))
    } else if let Some(roots) = &settings.roots {
        builder.with_root_certificates(Arc::clone(roots))
    } else {
        trusting_the_system(builder, is_used)
    };
    let mut config = match &settings.identity {
        Some(identity) => builder
            .with_client_cert_resolver(Arc::new(SingleCertAndKey::from(identity.certified()))),
        None => builder.with_no_client_auth(),
    };
    config.alpn_protocols = alpn.iter().map(|name| name.to_vec()).collect();
    config
}

fn trusting_the_system(
    builder: ConfigBuilder<ClientConfig, WantsVerifier>,
    is_used: bool,
) -> ConfigBuilder<ClientConfig, WantsClientCert> {
    if is_used {
        match builder.clone().with_native_roots() {
            Ok(builder) => return builder,
            Err(error) => tracing::error!(%error, "the system has no usable root certificates"),
        }
    }
    builder.with_root_certificates(RootCertStore::empty())
}

/// Takes any certificate for anybody's. The signatures are still checked, or nothing would be secret.
#[derive(Debug)]
struct Anyone(Arc<CryptoProvider>);

impl ServerCertVerifier for Anyone {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.0.signature_verification_algorithms;
        crypto::verify_tls12_signature(message, cert, signed, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.0.signature_verification_algorithms;
        crypto::verify_tls13_signature(message, cert, signed, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}
