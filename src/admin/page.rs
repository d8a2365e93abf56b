//! The page: one file, which asks nobody but this listener for anything.

use http::{HeaderValue, StatusCode, header};

use super::{Answer, answer};

const PAGE: &str = include_str!("page.html");

/// Where the page has its own script and style marked as such.
const NONCE: &str = "{nonce}";

pub(super) fn page() -> Answer {
    let nonce = nonce();
    let mut page = answer(StatusCode::OK, "text/html; charset=utf-8", PAGE.replace(NONCE, &nonce));
    let policy = format!(
        "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; img-src data:; \
         base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    );
    let policy = HeaderValue::from_str(&policy).expect("a nonce is in hexadecimal digits");
    let headers = page.headers_mut();
    headers.insert(header::CONTENT_SECURITY_POLICY, policy);
    headers.insert(header::X_FRAME_OPTIONS, HeaderValue::from_static("DENY"));
    headers.insert(header::REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
    page
}

/// New for every answer, so that nobody can have guessed it.
fn nonce() -> String {
    let mut bytes = [0; 16];
    aws_lc_rs::rand::fill(&mut bytes).expect("the system has randomness");
    format!("{:032x}", u128::from_ne_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_nonce_is_new_and_in_the_page() {
        let policy = |page: &Answer| page.headers()[header::CONTENT_SECURITY_POLICY].clone();
        assert_ne!(policy(&page()), policy(&page()));
        assert_eq!(PAGE.matches(NONCE).count(), 2);
    }

    #[test]
    fn the_page_has_nothing_from_elsewhere_and_no_markup_from_text() {
        for word in
            ["http:", "https:", "src=", "innerHTML", "outerHTML", "insertAdjacentHTML", "eval("]
        {
            let text = PAGE.replace("http://www.w3.org/2000/svg", "");
            assert!(!text.contains(word), "{word}");
        }
    }
}
