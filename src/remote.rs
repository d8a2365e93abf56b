//! Asks a running instance over its admin listener, and puts the answers into words.

use std::time::Duration;

use bytes::Bytes;
use http::{Method, Request, StatusCode, Uri, header};
use http_body_util::{BodyExt, Full, Limited};
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::TokioExecutor,
};
use serde_json::{Value, json};
use uuid::Uuid;

use crate::config::Secret;

mod words;

pub use words::{Ink, evicted, holders, line, table};

/// How long one question may take.
const PATIENCE: Duration = Duration::from_secs(10);

/// Longer answers make no sense.
const LONGEST_ANSWER: usize = 16 << 20;

/// The admin listener of an instance.
#[derive(Debug)]
pub struct Remote {
    at: AdminUrl,
    token: Option<Secret>,
    client: Client<HttpConnector, Full<Bytes>>,
}

/// `http://host:port`, where an admin listener is.
#[derive(Clone, Debug)]
pub struct AdminUrl(Uri);

impl std::str::FromStr for AdminUrl {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let uri: Option<Uri> = text.parse().ok();
        uri.filter(|uri| uri.scheme_str() == Some("http") && uri.path() == "/")
            .filter(|uri| uri.query().is_none() && !text.contains(['@', '#']))
            .map(Self)
            .ok_or_else(|| "must be a URL such as http://127.0.0.1:9900".to_owned())
    }
}

/// Why there is no answer to show.
#[derive(Debug, thiserror::Error)]
pub enum RemoteError {
    /// Nobody answered.
    #[error("no instance answers at {0}: {1}")]
    Unreachable(Uri, String),
    /// The instance said no.
    #[error("{1} ({0})")]
    Refused(StatusCode, String),
    /// It isn't an instance that answers there.
    #[error("the answer from {0} makes no sense")]
    BadAnswer(Uri),
}

/// What is to become of a limit's slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// This many.
    Slots(u32),
    /// As configured.
    Reset,
}

impl Remote {
    /// Takes where to ask, and what to show for it.
    pub fn new(at: AdminUrl, token: Option<Secret>) -> Self {
        Self { at, token, client: Client::builder(TokioExecutor::new()).build_http() }
    }

    /// Looks at every limit.
    ///
    /// # Errors
    /// See [`RemoteError`].
    pub async fn status(&self) -> Result<Value, RemoteError> {
        self.ask(Method::GET, "/status", None).await
    }

    /// Looks at a limit, or changes it first.
    ///
    /// # Errors
    /// See [`RemoteError`].
    pub async fn limit(&self, name: &str, change: Option<Change>) -> Result<Value, RemoteError> {
        let path = format!("/limits/{name}");
        let body = match change {
            None => return self.ask(Method::GET, &path, None).await,
            Some(Change::Slots(slots)) => json!({ "slots": slots }),
            Some(Change::Reset) => json!({ "slots": null }),
        };
        self.ask(Method::PATCH, &path, Some(body)).await
    }

    /// Lists who has slots of a limit.
    ///
    /// # Errors
    /// See [`RemoteError`].
    pub async fn holders(&self, name: &str) -> Result<Value, RemoteError> {
        self.ask(Method::GET, &format!("/limits/{name}/holders"), None).await
    }

    /// Ends the request of a holder.
    ///
    /// # Errors
    /// See [`RemoteError`].
    pub async fn evict(&self, name: &str, id: Uuid, force: bool) -> Result<Value, RemoteError> {
        let force = if force { "?force=true" } else { "" };
        self.ask(Method::DELETE, &format!("/limits/{name}/holders/{id}{force}"), None).await
    }

    async fn ask(
        &self,
        method: Method,
        path: &str,
        body: Option<Value>,
    ) -> Result<Value, RemoteError> {
        let AdminUrl(at) = &self.at;
        let unreachable = |why: String| RemoteError::Unreachable(at.clone(), why);
        let root = at.to_string();
        let mut request = Request::builder()
            .method(method)
            .uri(format!("{}{path}", root.trim_end_matches('/')))
            .header(header::CONTENT_TYPE, "application/json");
        if let Some(Secret(token)) = &self.token {
            request = request.header(header::AUTHORIZATION, format!("Bearer {token}"));
        }
        let body = body.map_or_else(Bytes::new, |body| body.to_string().into());
        let request = request.body(Full::new(body)).map_err(|why| unreachable(why.to_string()))?;
        let asked = async {
            let response = self
                .client
                .request(request)
                .await
                .map_err(|error| unreachable(source_of(&error).to_string()))?;
            let status = response.status();
            let body = Limited::new(response.into_body(), LONGEST_ANSWER).collect().await;
            Ok((status, body.map_err(|error| unreachable(error.to_string()))?.to_bytes()))
        };
        let timely = tokio::time::timeout(PATIENCE, asked).await;
        let (status, body) = timely.map_err(|_| unreachable("it takes too long".to_owned()))??;
        if !status.is_success() {
            let why = String::from_utf8_lossy(&body).trim().to_owned();
            return Err(RemoteError::Refused(status, why));
        }
        serde_json::from_slice(&body).map_err(|_| RemoteError::BadAnswer(at.clone()))
    }
}

/// What happened at the bottom, "Connection refused".
fn source_of<'a>(error: &'a (dyn std::error::Error + 'static)) -> &'a dyn std::error::Error {
    let mut deepest = error;
    while let Some(source) = deepest.source() {
        deepest = source;
    }
    deepest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_plain_url_is_taken() {
        for good in ["http://127.0.0.1:9900", "http://[::1]:9900/", "http://host"] {
            assert!(good.parse::<AdminUrl>().is_ok(), "{good}");
        }
        for bad in ["", "127.0.0.1:9900", "https://a", "http://a/b", "http://a?b", "http://u:p@a"] {
            assert!(bad.parse::<AdminUrl>().is_err(), "{bad}");
        }
    }

    #[tokio::test]
    async fn nobody_there_is_said() {
        let free = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", free.local_addr().unwrap());
        drop(free);
        let error = Remote::new(url.parse().unwrap(), None).status().await.unwrap_err().to_string();
        assert!(error.starts_with(&format!("no instance answers at {url}")), "{error}");
        assert!(error.contains("refused"), "{error}");
    }
}
