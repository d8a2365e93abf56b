//! Resolves classes, keys, rates, and what a route does with them.

use std::{ops::Range, sync::Arc, time::Duration};

use http::Method;
use toml::Spanned;

use super::{
    At, Found, Names, REQUESTS, WAITERS, in_order, index, optional, or, or_text, positive,
    reference, required, text,
};
use crate::config::{
    ClassPolicy, ClassRule, Classes, Dialect, Limit, Queue, Rate, Route, Step, Upstream,
    WeightRule,
    error::Problem,
    file::{
        FileClass, FileClassPolicy, FileClassTable, FileClasses, FileQueue, FileQueueTable,
        FileRate, FileRoute, FileStep, FileWeight, FileWeightTable, Named, ShortOr,
    },
    rules,
};

/// The classes with an index of their names.
pub(super) struct KnownClasses {
    pub(super) classes: Classes,
    names: Names,
}

pub(super) fn classes(file: &FileClasses) -> Found<KnownClasses> {
    let mut classes = Classes::default();
    classes.ageing = positive(&file.ageing, classes.ageing.as_millis() as u64)?;
    if let Some(order) = &file.order {
        if !(1..=8).contains(&order.get_ref().len()) {
            return Err(Problem::new(order.span(), "must hold 1 to 8 names, the highest first"));
        }
        classes.order.clear();
        for name in order.get_ref() {
            rules::name(name.get_ref()).at(name.span())?;
            let name_text = Arc::from(name.get_ref().as_str());
            if classes.order.contains(&name_text) {
                return Err(Problem::new(name.span(), "must hold each name once"));
            }
            classes.order.push(name_text);
        }
    }
    let names = index(classes.order.iter());
    Ok(KnownClasses { classes, names })
}

pub(super) fn rate(name: &Spanned<String>, file: &FileRate) -> Found<Rate> {
    rules::name(name.get_ref()).at(name.span())?;
    let requests = required(name.span(), &file.requests, "requests")?;
    let window = required(name.span(), &file.window, "window")?;
    Ok(Rate {
        name: Arc::from(name.get_ref().as_str()),
        requests: rules::within(*requests.get_ref(), REQUESTS).at(requests.span())?,
        window: rules::window(window.get_ref().0).at(window.span())?,
        key: optional(&file.key, rules::key)?,
        mode: or_text(&file.mode, "enforce", rules::mode)?,
    })
}

// === limits ===

pub(super) fn slots_for(
    file: &Option<Spanned<Named<Spanned<i64>>>>,
    has_key: bool,
) -> Found<Vec<(String, u32)>> {
    match file {
        Some(file) if !has_key => {
            Err(Problem::new(file.span(), "needs a `key` whose values it names"))
        }
        Some(file) => by_value(file.get_ref(), slots),
        None => Ok(Vec::new()),
    }
}

pub(super) fn slots(slots: &Spanned<i64>) -> Found<u32> {
    rules::within(*slots.get_ref(), rules::SLOTS).at(slots.span())
}

/// Tables of key values, in the order of the file.
fn by_value<T, U>(
    table: &Named<Spanned<T>>,
    resolve: impl Fn(&Spanned<T>) -> Found<U>,
) -> Found<Vec<(String, U)>> {
    in_order(table, |value, entry| Ok((value.get_ref().clone(), resolve(entry)?)))
}

pub(super) fn class_policies(
    file: &Named<FileClassPolicy>,
    classes: &KnownClasses,
) -> Found<Vec<ClassPolicy>> {
    let mut policies = vec![ClassPolicy::default(); classes.classes.order.len()];
    for (name, policy) in file {
        let class = reference(name, &classes.names, "class")?;
        let (queue, timeout) = queue_parts(&policy.queue)?;
        policies[class] =
            ClassPolicy { share: or(&policy.share, 1.0, rules::share)?, queue, timeout };
    }
    Ok(policies)
}

pub(super) fn queue(file: &Option<Spanned<FileQueue>>, slots: u32) -> Found<Queue> {
    let (size, timeout) = queue_parts(file)?;
    Ok(Queue {
        size: size.unwrap_or((4 * slots).max(64)),
        timeout: timeout.unwrap_or(Duration::from_secs(10)),
    })
}

fn queue_parts(file: &Option<Spanned<FileQueue>>) -> Found<(Option<u32>, Option<Duration>)> {
    let by_default = FileQueueTable::default();
    let (size, table) = match file.as_ref().map(|queue| (queue.span(), queue.get_ref())) {
        None => (None, &by_default),
        Some((span, ShortOr::Short(size))) => (Some((*size, span)), &by_default),
        Some((_, ShortOr::Table(table))) => {
            let size = table.size.as_ref();
            (size.map(|size| (*size.get_ref(), size.span())), table)
        }
    };
    let size = size.map(|(size, span)| rules::within(size, WAITERS).at(span)).transpose()?;
    let timeout = table.timeout.as_ref();
    let timeout = timeout.map(|timeout| rules::positive(timeout.get_ref().0).at(timeout.span()));
    Ok((size, timeout.transpose()?))
}

// === routes ===

pub(super) fn class(file: &Option<Spanned<FileClass>>, known: &KnownClasses) -> Found<ClassRule> {
    let usual = known.classes.usual();
    match file.as_ref().map(|class| (class.span(), class.get_ref())) {
        None => Ok(ClassRule::Fixed(usual)),
        Some((span, ShortOr::Short(name))) => {
            let name = Spanned::new(span, name.clone());
            Ok(ClassRule::Fixed(reference(&name, &known.names, "class")?))
        }
        Some((span, ShortOr::Table(table))) => {
            let FileClassTable { header, key, classes, default } = table;
            let named = |name: &Spanned<String>| reference(name, &known.names, "class");
            let default = default.as_ref().map_or(Ok(usual), named)?;
            match (header, key) {
                (Some(header), None) if classes.is_empty() => {
                    let name = rules::header(header.get_ref()).at(header.span())?;
                    Ok(ClassRule::Header { name, default })
                }
                (None, Some(key)) => {
                    let key = rules::key(key.get_ref()).at(key.span())?;
                    Ok(ClassRule::ByKey { key, classes: by_value(classes, named)?, default })
                }
                _ => Err(Problem::new(span, "must hold either `header`, or `key` and `classes`")),
            }
        }
    }
}

pub(super) fn weight(file: &Option<Spanned<FileWeight>>) -> Found<WeightRule> {
    match file.as_ref().map(|weight| (weight.span(), weight.get_ref())) {
        None => Ok(WeightRule::Fixed(1)),
        Some((span, ShortOr::Short(weight))) => {
            Ok(WeightRule::Fixed(rules::within(*weight, rules::WEIGHTS).at(span)?))
        }
        Some((span, ShortOr::Table(table))) => {
            let FileWeightTable { header, bytes_per_slot, max } = table;
            let max = required(span.clone(), max, "max")?;
            let max = rules::within(*max.get_ref(), rules::WEIGHTS).at(max.span())?;
            match (header, bytes_per_slot) {
                (Some(header), None) => {
                    let name = rules::header(header.get_ref()).at(header.span())?;
                    Ok(WeightRule::Header { name, max })
                }
                (None, Some(bytes)) => Ok(WeightRule::Bytes { per_slot: bytes.get_ref().0, max }),
                _ => Err(Problem::new(span, "must hold either `header` or `bytes_per_slot`")),
            }
        }
    }
}

pub(super) fn step(table: &Spanned<FileStep>, upstreams: &Names) -> Found<Step> {
    let file = table.get_ref();
    // A key that belongs to another kind of step.
    let stray = |places: [Option<Range<usize>>; 2], rule: &str| {
        let place = places.into_iter().flatten().next();
        place.map_or(Ok(()), |place| Err(Problem::new(place, rule)))
    };
    let credentials = file.forward_credentials.as_ref();
    let body =
        [file.body.as_ref().map(Spanned::span), file.content_type.as_ref().map(Spanned::span)];
    let step = match (&file.upstream, &file.stale, &file.respond) {
        (Some(upstream), None, None) => Step::Upstream {
            upstream: reference(upstream, upstreams, "upstream")?,
            forward_credentials: credentials.is_some_and(|forward| *forward.get_ref()),
        },
        (None, Some(_), None) => Step::Stale { allowance: positive(&file.stale, 0)? },
        (None, None, Some(_)) => Step::Respond {
            status: or(&file.respond, 200, rules::answer_status)?,
            body: text(&file.body, "").to_owned(),
            content_type: or_text(
                &file.content_type,
                "text/plain; charset=utf-8",
                rules::content_type,
            )?,
        },
        _ => {
            let rule = "must hold one of `upstream`, `stale` and `respond`";
            return Err(Problem::new(table.span(), rule));
        }
    };
    if !matches!(step, Step::Upstream { .. }) {
        stray([credentials.map(Spanned::span), None], "belongs to a step with `upstream`")?;
    }
    if !matches!(step, Step::Respond { .. }) {
        stray(body, "belongs to a step with `respond`")?;
    }
    Ok(step)
}

/// How long an upstream may stay silent by default, ms: models think for minutes.
pub(super) fn silence(upstream: &str, routes: &[Spanned<FileRoute>]) -> u64 {
    let is_it = |name: &Option<Spanned<String>>| text(name, "") == upstream;
    let mut leading = routes.iter().map(Spanned::get_ref).filter(|route| {
        is_it(&route.upstream) || route.on_full.iter().any(|step| is_it(&step.get_ref().upstream))
    });
    let is_patient = |route: &FileRoute| {
        matches!(
            rules::dialect(text(&route.dialect, "problem")),
            Ok(Dialect::OpenAi | Dialect::Anthropic)
        )
    };
    let first = leading.next();
    if first.is_some_and(is_patient) && leading.all(is_patient) { 600_000 } else { 60_000 }
}

/// A step to another upstream must not need what is full, and copies are of answers to GET.
pub(super) fn check_steps(
    table: &FileRoute,
    route: &Route,
    upstreams: &[Upstream],
    limits: &[Limit],
) -> Found<()> {
    for (file, step) in table.on_full.iter().zip(&route.on_full) {
        if let (Step::Stale { .. }, Some(stale)) = (step, &file.get_ref().stale)
            && !(route.methods.is_empty() || route.methods.contains(&Method::GET))
        {
            let rule = "needs GET among the route's methods: copies are of its answers";
            return Err(Problem::new(stale.span(), rule));
        }
        let Step::Upstream { upstream, .. } = step else { continue };
        let own = &upstreams[*upstream].limits;
        if let Some(&both) = own.iter().find(|limit| route.limits.contains(limit)) {
            let rule = format!(
                "must not share a limit with the route, and both take `{}`",
                limits[both].name
            );
            return Err(Problem::new(step_place(file), rule));
        }
    }
    Ok(())
}

pub(super) fn step_place(file: &Spanned<FileStep>) -> Range<usize> {
    file.get_ref().upstream.as_ref().map_or(file.span(), Spanned::span)
}
