//! Where an upstream is.

use std::net::SocketAddr;

use http::Uri;
use toml::Spanned;

use super::{At, Found};
use crate::config::{error::Problem, rules};

/// How many endpoints one upstream may have.
const MOST: usize = 256;

/// `admin` is where none of them may lead.
pub(super) fn endpoints(
    file: &Spanned<Vec<Spanned<String>>>,
    admin: SocketAddr,
) -> Found<Vec<Uri>> {
    if !(1..=MOST).contains(&file.get_ref().len()) {
        return Err(Problem::new(file.span(), format!("must hold 1 to {MOST} endpoints")));
    }
    let mut endpoints: Vec<Uri> = Vec::with_capacity(file.get_ref().len());
    for text in file.get_ref() {
        let endpoint = rules::endpoint(text.get_ref()).at(text.span())?;
        rules::not_admin(&endpoint, admin).at(text.span())?;
        rules::fits_in(&endpoint, &endpoints).at(text.span())?;
        endpoints.push(endpoint);
    }
    Ok(endpoints)
}
