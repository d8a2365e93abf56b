//! How much is logged, to be seen and changed while the process runs.

use http::{Method, Request, StatusCode};
use http_body_util::{BodyExt, Limited};
use hyper::body::Incoming;
use serde_json::{Map, Value, json};

use super::{
    Admin, Answer, BODY_TIMEOUT, LONGEST_BODY, denied, guard::Denied, json_answer, not_allowed,
};
use crate::{config, log::Change};

const RULE: &str = "the body must be an object of \"level\", \"requests\" and \"sample\", each as under [log] in the configuration, or null for what stands there\n";

impl Admin {
    pub(super) async fn log(&self, request: Request<Incoming>) -> Answer {
        match *request.method() {
            Method::GET | Method::HEAD => {}
            Method::PATCH => match self.wanted_log(request).await {
                Ok(change) => self.log.change(change),
                Err((status, why)) => return denied(status, why),
            },
            _ => return not_allowed("GET, HEAD, PATCH"),
        }
        let config::Log { level, requests, sample, .. } = self.log.in_force();
        json_answer(
            StatusCode::OK,
            &json!({ "level": level, "requests": requests, "sample": sample }),
        )
    }

    /// What a permitted write asks for.
    async fn wanted_log(&self, request: Request<Incoming>) -> Result<Change, Denied> {
        self.guard.check(request.headers())?;
        let body = Limited::new(request.into_body(), LONGEST_BODY).collect();
        let body = tokio::time::timeout(BODY_TIMEOUT, body).await;
        let body = body.ok().and_then(Result::ok).map(|body| body.to_bytes());
        let body = body.and_then(|body| serde_json::from_slice(&body).ok());
        body.and_then(|body| change_of(&body)).ok_or((StatusCode::BAD_REQUEST, RULE))
    }
}

fn change_of(body: &Map<String, Value>) -> Option<Change> {
    let mut change = Change::default();
    for (key, value) in body {
        match (key.as_str(), value) {
            ("level", Value::Null) => change.level = Some(None),
            ("level", value) => {
                change.level = Some(Some(config::log::level(value.as_str()?).ok()?));
            }
            ("requests", Value::Null) => change.requests = Some(None),
            ("requests", value) => change.requests = Some(Some(value.as_bool()?)),
            ("sample", Value::Null) => change.sample = Some(None),
            ("sample", value) => {
                change.sample = Some(Some(config::log::sample(value.as_f64()?).ok()?));
            }
            _ => return None,
        }
    }
    Some(change)
}
