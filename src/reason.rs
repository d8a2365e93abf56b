//! Names every reason for which Tidegate answers a request itself.

use http::StatusCode;

/// The one machine word for a refusal: response header, metric label, log field and column are all [`Reason::as_str`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reason {
    /// No slot was free and the queue had no room.
    QueueFull,
    /// The request waited, and had to go for one of a higher class.
    Displaced,
    /// The request would not have been served before its deadline.
    Deadline,
    /// A rate's window is full.
    RateLimited,
    /// The request waited as long as its queue lets a request wait.
    QueueTimeout,
    /// The store admits nobody yet, since its memory may be incomplete, and the request can't wait.
    Recovering,
    /// The store that counts the slots can't be reached.
    StoreDown,
    /// This process has as many requests in flight as it may have.
    ProcessFull,
    /// This process is stopping.
    Draining,
    /// The request takes more slots than the limit has.
    TooHeavy,
    /// No route leads anywhere for this host and path.
    NoRoute,
    /// A route exists, but not for this method.
    MethodNotAllowed,
    /// The request isn't one that can be forwarded safely.
    BadRequest,
    /// The head of the request is longer than heads may be.
    HeadTooLarge,
    /// The client took too long to send the request body, or to take the answer.
    ClientTimeout,
    /// The upstream couldn't be connected to.
    UpstreamConnect,
    /// The upstream didn't answer in time.
    UpstreamTimeout,
    /// The upstream closed the connection before its answer began, or answered nonsense.
    UpstreamReset,
    /// The request was in flight for longer than its limit lets a request hold a slot.
    MaxHold,
    /// The store didn't confirm the request's lease in time, so that its slot may become another's.
    LeaseLost,
    /// An operator ended the request.
    Evicted,
    /// Tidegate failed; never expected.
    Internal,
}

impl Reason {
    /// Every reason, in the order of the documentation.
    pub const ALL: [Reason; 22] = [
        Reason::Draining,
        Reason::ProcessFull,
        Reason::BadRequest,
        Reason::HeadTooLarge,
        Reason::NoRoute,
        Reason::MethodNotAllowed,
        Reason::TooHeavy,
        Reason::RateLimited,
        Reason::StoreDown,
        Reason::Recovering,
        Reason::QueueFull,
        Reason::Displaced,
        Reason::Deadline,
        Reason::QueueTimeout,
        Reason::ClientTimeout,
        Reason::UpstreamConnect,
        Reason::UpstreamTimeout,
        Reason::UpstreamReset,
        Reason::MaxHold,
        Reason::LeaseLost,
        Reason::Evicted,
        Reason::Internal,
    ];

    /// The word itself, stable across releases.
    pub const fn as_str(self) -> &'static str {
        match self {
            Reason::QueueFull => "queue_full",
            Reason::Displaced => "displaced",
            Reason::Deadline => "deadline",
            Reason::RateLimited => "rate_limited",
            Reason::QueueTimeout => "queue_timeout",
            Reason::Recovering => "recovering",
            Reason::StoreDown => "store_down",
            Reason::ProcessFull => "process_full",
            Reason::Draining => "draining",
            Reason::TooHeavy => "too_heavy",
            Reason::NoRoute => "no_route",
            Reason::MethodNotAllowed => "method_not_allowed",
            Reason::BadRequest => "bad_request",
            Reason::HeadTooLarge => "head_too_large",
            Reason::ClientTimeout => "client_timeout",
            Reason::UpstreamConnect => "upstream_connect",
            Reason::UpstreamTimeout => "upstream_timeout",
            Reason::UpstreamReset => "upstream_reset",
            Reason::MaxHold => "max_hold",
            Reason::LeaseLost => "lease_lost",
            Reason::Evicted => "evicted",
            Reason::Internal => "internal",
        }
    }

    /// The status of the answer and the sentence in its body.
    pub const fn answer(self) -> (StatusCode, &'static str) {
        match self {
            Reason::QueueFull => {
                (StatusCode::SERVICE_UNAVAILABLE, "every slot is taken and the queue is full")
            }
            Reason::Displaced => (
                StatusCode::SERVICE_UNAVAILABLE,
                "the queue is full, and a request of a higher class came",
            ),
            Reason::Deadline => (
                StatusCode::SERVICE_UNAVAILABLE,
                "no slot would have become free before the deadline",
            ),
            Reason::RateLimited => {
                (StatusCode::TOO_MANY_REQUESTS, "too many requests in this time")
            }
            Reason::QueueTimeout => {
                (StatusCode::SERVICE_UNAVAILABLE, "no slot became free in time")
            }
            Reason::Recovering => {
                (StatusCode::SERVICE_UNAVAILABLE, "slots are being counted again after a loss")
            }
            Reason::StoreDown => (
                StatusCode::SERVICE_UNAVAILABLE,
                "the store that counts the slots can't be reached",
            ),
            Reason::ProcessFull => (
                StatusCode::SERVICE_UNAVAILABLE,
                "this instance has as many requests as it may have",
            ),
            Reason::Draining => (StatusCode::SERVICE_UNAVAILABLE, "this instance is stopping"),
            Reason::TooHeavy => {
                (StatusCode::PAYLOAD_TOO_LARGE, "the request takes more slots than the limit has")
            }
            Reason::NoRoute => (StatusCode::NOT_FOUND, "no route for this host and path"),
            Reason::MethodNotAllowed => {
                (StatusCode::METHOD_NOT_ALLOWED, "the route doesn't take this method")
            }
            Reason::BadRequest => {
                (StatusCode::BAD_REQUEST, "the request can't be forwarded safely")
            }
            Reason::HeadTooLarge => {
                (StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE, "the head of the request is too long")
            }
            Reason::ClientTimeout => {
                (StatusCode::REQUEST_TIMEOUT, "the request body came too slowly")
            }
            Reason::UpstreamConnect => {
                (StatusCode::BAD_GATEWAY, "the upstream couldn't be connected to")
            }
            Reason::UpstreamTimeout => {
                (StatusCode::GATEWAY_TIMEOUT, "the upstream didn't answer in time")
            }
            Reason::UpstreamReset => {
                (StatusCode::BAD_GATEWAY, "the upstream closed the connection before it answered")
            }
            Reason::MaxHold => (
                StatusCode::GATEWAY_TIMEOUT,
                "the request held its slot for longer than the limit allows",
            ),
            Reason::LeaseLost => (
                StatusCode::GATEWAY_TIMEOUT,
                "the store didn't confirm the slot in time, so it may become another's",
            ),
            Reason::Evicted => (StatusCode::SERVICE_UNAVAILABLE, "an operator ended the request"),
            Reason::Internal => (StatusCode::INTERNAL_SERVER_ERROR, "an error inside the proxy"),
        }
    }

    /// Whether a limit says this, which may have a status of its own for it.
    pub const fn is_of_a_limit(self) -> bool {
        matches!(
            self,
            Reason::QueueFull
                | Reason::Displaced
                | Reason::Deadline
                | Reason::QueueTimeout
                | Reason::Recovering
        )
    }

    /// Whether a route's ladder is tried before this is said.
    pub const fn can_degrade(self) -> bool {
        self.is_of_a_limit() || matches!(self, Reason::StoreDown)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ladder_is_for_what_a_limit_says() {
        let tried = Reason::ALL.into_iter().filter(|reason| reason.can_degrade());
        let tried: Vec<_> = tried.map(Reason::as_str).collect();
        let expected =
            ["store_down", "recovering", "queue_full", "displaced", "deadline", "queue_timeout"];
        assert_eq!(tried, expected);
    }
}
