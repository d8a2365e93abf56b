//! Where an upstream is, and whether it is well there.

use std::{net::SocketAddr, ops::RangeInclusive, time::Duration};

use http::{StatusCode, Uri};
use toml::Spanned;

use super::{At, Found, or, positive, required};
use crate::config::{
    Ejection, HealthCheck,
    error::Problem,
    file::{FileDuration, FileEjection, FileHealthCheck},
    rules,
};

/// How many endpoints one upstream may have.
const MOST: usize = 256;

/// How many answers in a row may be waited for.
const IN_A_ROW: RangeInclusive<i64> = 1..=1000;

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

/// None for never, which is what "0s" says as well.
pub(super) fn ping_interval(
    file: &Option<Spanned<FileDuration>>,
    http2: bool,
) -> Found<Option<Duration>> {
    let Some(interval) = file else {
        return Ok(None);
    };
    if !http2 {
        return Err(Problem::new(interval.span(), "needs http2 = true"));
    }
    Ok(Some(interval.get_ref().0).filter(|interval| !interval.is_zero()))
}

pub(super) fn health(table: &Spanned<FileHealthCheck>) -> Found<HealthCheck> {
    let file = table.get_ref();
    let path = required(table.span(), &file.path, "path")?;
    let in_a_row = |number| rules::within(number, IN_A_ROW);
    Ok(HealthCheck {
        path: rules::health_path(path.get_ref()).at(path.span())?,
        interval: positive(&file.interval, 5_000)?,
        timeout: positive(&file.timeout, 2_000)?,
        healthy: or(&file.healthy, 2, in_a_row)?,
        unhealthy: or(&file.unhealthy, 3, in_a_row)?,
        statuses: statuses(&file.statuses)?.unwrap_or_default(),
    })
}

pub(super) fn ejection(table: &Spanned<FileEjection>) -> Found<Ejection> {
    let file = table.get_ref();
    let usual = [502, 503, 504].map(|status| StatusCode::from_u16(status).expect("a status"));
    let time = positive(&file.time, 10_000)?;
    let max_time = positive(&file.max_time, 5 * 60_000)?;
    if max_time < time {
        let longest = file.max_time.as_ref().or(file.time.as_ref());
        let place = longest.map_or(table.span(), Spanned::span);
        return Err(Problem::new(place, "max_time must be no shorter than time"));
    }
    Ok(Ejection {
        failures: or(&file.failures, 5, |number| rules::within(number, IN_A_ROW))?,
        statuses: statuses(&file.statuses)?.unwrap_or(usual.to_vec()),
        time,
        max_time,
        share: or(&file.share, 0.5, rules::share)?,
    })
}

fn statuses(file: &Option<Vec<Spanned<i64>>>) -> Found<Option<Vec<StatusCode>>> {
    let all = file.as_ref().map(|all| {
        all.iter().map(|status| rules::status(*status.get_ref()).at(status.span())).collect()
    });
    all.transpose()
}
