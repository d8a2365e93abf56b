//! Who has the slots of a limit, and that one of them ends.

use http::{Method, Request, StatusCode};
use hyper::body::Incoming;
use serde_json::{Value, json};
use uuid::Uuid;

use super::{Admin, Answer, TEXT, answer, denied, json_answer, not_allowed, text};
use crate::{admission::Eviction, store::Holder};

impl Admin {
    /// `GET /limits/<name>/holders`
    pub(super) async fn holders(&self, limit: usize, request: &Request<Incoming>) -> Answer {
        if request.method() != Method::GET && request.method() != Method::HEAD {
            return not_allowed("GET, HEAD");
        }
        match self.admission.holders(limit).await {
            Ok(holders) => {
                let name = &self.limits[limit];
                let holders: Vec<Value> =
                    holders.iter().map(|holder| holder_status(name, holder)).collect();
                // Looked at behind the list, so that one which was forgotten in between isn't told as whole.
                let status = self.admission.status(limit).await.ok();
                let outlook = self.admission.outlook();
                let is_recovering = self.is_recovering(&outlook, limit, status.as_ref());
                let listed = json!({ "holders": holders, "recovering": is_recovering });
                json_answer(StatusCode::OK, &listed)
            }
            Err(error) => answer(StatusCode::SERVICE_UNAVAILABLE, TEXT, format!("{error}\n")),
        }
    }

    /// `DELETE /limits/<name>/holders/<id>`
    pub(super) async fn holder(
        &self,
        limit: usize,
        id: &str,
        request: &Request<Incoming>,
    ) -> Answer {
        if request.method() != Method::DELETE {
            return not_allowed("DELETE");
        }
        if let Err((status, why)) = self.guard.check(request.headers()) {
            return denied(status, why);
        }
        let force = match request.uri().query() {
            None | Some("force=false") => false,
            Some("force=true") => true,
            Some(_) => return text(StatusCode::BAD_REQUEST, "there is force=true, nothing else\n"),
        };
        let Ok(id) = Uuid::try_parse(id) else {
            let why = "no holder of Tidegate's: their ids are UUIDs; what a plain client took it gives back itself\n";
            return text(StatusCode::NOT_FOUND, why);
        };
        let evicted = match self.admission.evict(limit, id, force).await {
            Ok(evicted) => evicted,
            Err(error) => {
                return answer(StatusCode::SERVICE_UNAVAILABLE, TEXT, format!("{error}\n"));
            }
        };
        let name = &self.limits[limit];
        let outcome = evicted.as_str();
        tracing::info!(limit = %name, holder = %id, outcome, "an operator asked to evict a holder");
        let done = |status, word| {
            json_answer(status, &json!({ "holder": id.to_string(), "evicted": word }))
        };
        match evicted {
            Eviction::Cut => done(StatusCode::OK, "cut"),
            Eviction::Removed => done(StatusCode::OK, "removed"),
            Eviction::Told => done(StatusCode::ACCEPTED, "told"),
            Eviction::Unknown => text(StatusCode::NOT_FOUND, "nobody holds slots under this id\n"),
            Eviction::Plain => text(
                StatusCode::CONFLICT,
                "a plain client has it, who can't be told; it ends with its lease at the latest\n",
            ),
            Eviction::Gone => text(
                StatusCode::CONFLICT,
                "its instance is gone; it ends with its lease, or at once with force (--force), \
                 whatever the upstream still does for it\n",
            ),
            Eviction::Idle => text(
                StatusCode::CONFLICT,
                "no request runs under it: it is just coming or going, or kept for the next one\n",
            ),
            Eviction::Deaf => text(
                StatusCode::SERVICE_UNAVAILABLE,
                "its instance doesn't hear of anything just now; try again in a second\n",
            ),
        }
    }
}

/// The value of a key is told as its digest, as the store has it.
fn holder_status(limit: &str, holder: &Holder) -> Value {
    let of = holder.of.as_ref();
    let key = holder.set.strip_prefix(limit).and_then(|rest| rest.strip_prefix(':'));
    json!({
        "id": holder.id,
        "instance": of.map(|of| of.instance.to_string()),
        "route": of.map(|of| &of.route),
        "class": of.map(|of| &of.class),
        "weight": holder.weight,
        "age_ms": holder.age,
        "key": key,
    })
}
